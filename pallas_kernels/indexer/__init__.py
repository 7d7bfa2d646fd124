"""Scores of an indexer and the choice of the rows that sparse attention reads."""

from pallas_kernels.indexer.contract import ABI as ABI
from pallas_kernels.indexer.contract import index_scores as index_scores
from pallas_kernels.indexer.contract import index_topk as index_topk
