"""Flax NNX layers that take and return the cache view explicitly.

An attention layer is `y, view = layer(x, view)`: it reads history through `view.read`, hands new
rows to `view.write`, and holds no state but its weights. Importing this package imports flax;
`import hkv` does not.
"""

from hkv.nn._attention import AttentionShape as AttentionShape
from hkv.nn._attention import CompressedSparseAttention as CompressedSparseAttention
from hkv.nn._attention import HeavilyCompressedAttention as HeavilyCompressedAttention
from hkv.nn._attention import SlidingAttention as SlidingAttention
from hkv.nn._compressor import Compressor as Compressor
from hkv.nn._hyper import HyperConnection as HyperConnection
from hkv.nn._hyper import HyperHead as HyperHead
from hkv.nn._indexer import Indexer as Indexer
from hkv.nn._moe import MoE as MoE
from hkv.nn._moe import MoEShape as MoEShape
from hkv.nn._norm import RMSNorm as RMSNorm
from hkv.nn._norm import rms_norm as rms_norm
from hkv.nn._rotary import Rotary as Rotary
from hkv.nn._rotary import Yarn as Yarn
from hkv.nn._rotary import rotate as rotate
from hkv.nn._view import CacheView as CacheView
from hkv.nn._view import positions as positions
from hkv.nn._view import read_rows as read_rows
from hkv.nn._weights import Weights as Weights
from hkv.nn._weights import bind as bind
from hkv.nn._weights import random_weights as random_weights
