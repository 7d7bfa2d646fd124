"""Segments outside of device memory: self-describing records, and where they are kept.

Host code alone: NumPy, the standard library, and `google-crc32c` from the extra `disk`.
"""

from hkv.disk._local import LocalStore as LocalStore
from hkv.disk._local import Outcome as Outcome
from hkv.disk._record import Header as Header
from hkv.disk._record import Problem as Problem
from hkv.disk._record import Record as Record
from hkv.disk._record import Rejected as Rejected
from hkv.disk._record import Section as Section
from hkv.disk._record import Wanted as Wanted
