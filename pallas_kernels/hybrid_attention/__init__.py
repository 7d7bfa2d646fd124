"""Attention of a chunk of queries over several cache forms at once."""

from pallas_kernels.hybrid_attention.contract import ABI as ABI
from pallas_kernels.hybrid_attention.contract import Part as Part
from pallas_kernels.hybrid_attention.contract import attention as attention
from pallas_kernels.hybrid_attention.contract import merge as merge
