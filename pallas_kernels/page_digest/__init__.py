"""Digest of the rows in a range of a request's pages."""

from pallas_kernels.page_digest.contract import ABI as ABI
from pallas_kernels.page_digest.contract import digest_pages as digest_pages
