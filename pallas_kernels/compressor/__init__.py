"""Pooling of token rows into compressed history entries."""

from pallas_kernels.compressor.contract import ABI as ABI
from pallas_kernels.compressor.contract import compress as compress
