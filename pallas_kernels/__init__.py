"""Array operations of a paged cache for hybrid attention: contracts and implementations.

Knows arrays and the meaning of their bytes, nothing of requests, prefixes or models. Each
operation's `contract.py` states its layout with an example in numbers; `implementation=None`
picks what runs best in this build. Indices are int32; the value one past the end means "none".
"""

from typing import Final

from pallas_kernels import compressor, hybrid_attention, indexer, masks, page_digest, paged_rows
from pallas_kernels.compressor import compress as compress
from pallas_kernels.hybrid_attention import Part as Part
from pallas_kernels.hybrid_attention import attention as attention
from pallas_kernels.hybrid_attention import merge as merge
from pallas_kernels.indexer import index_scores as index_scores
from pallas_kernels.indexer import index_topk as index_topk
from pallas_kernels.masks import chunk_mask as chunk_mask
from pallas_kernels.masks import full_mask as full_mask
from pallas_kernels.masks import history_mask as history_mask
from pallas_kernels.masks import window_mask as window_mask
from pallas_kernels.page_digest import digest_pages as digest_pages
from pallas_kernels.paged_rows import copy_pages as copy_pages
from pallas_kernels.paged_rows import gather_rows as gather_rows
from pallas_kernels.paged_rows import scatter_rows as scatter_rows

# Version of each operation's contract: raised when the same inputs would mean something else.
ABI: Final[dict[str, int]] = {
    "compressor": compressor.ABI,
    "hybrid_attention": hybrid_attention.ABI,
    "indexer": indexer.ABI,
    "masks": masks.ABI,
    "page_digest": page_digest.ABI,
    "paged_rows": paged_rows.ABI,
}
