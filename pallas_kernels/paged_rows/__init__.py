"""Reading and writing rows of a paged pool, with the page stamps checked in the same program."""

from pallas_kernels.paged_rows.contract import ABI as ABI
from pallas_kernels.paged_rows.contract import copy_pages as copy_pages
from pallas_kernels.paged_rows.contract import gather_rows as gather_rows
from pallas_kernels.paged_rows.contract import scatter_rows as scatter_rows
