"""A functional KV cache for hybrid-attention models, in which reuse is a checked decision.

The names below stand in the order in which a request meets them.
"""

# Describe what a model keeps.
from hkv._layout import Form as Form
from hkv._layout import Group as Group
from hkv._layout import Layout as Layout
from hkv._rules import Kind as Kind
from hkv._rules import Rule as Rule
from hkv._rules import chunk as chunk
from hkv._rules import history as history
from hkv._rules import indexer as indexer
from hkv._rules import replay_start as replay_start
from hkv._rules import required as required
from hkv._rules import state as state
from hkv._rules import tail as tail
from hkv._rules import window as window

# isort: split
# Create.
from hkv._cache import Cache as Cache
from hkv._cache import Segment as Segment
from hkv._cache import abstract as abstract
from hkv._cache import init as init
from hkv._cache import nbytes as nbytes
from hkv._describe import describe as describe
from hkv._lifecycle import Life as Life
from hkv._lifecycle import Refusal as Refusal
from hkv._lifecycle import Transition as Transition

# isort: split
# Query.
from hkv._availability import Availability as Availability
from hkv._availability import Place as Place
from hkv._availability import Provenance as Provenance
from hkv._availability import Reason as Reason
from hkv._availability import Status as Status
from hkv._availability import explain as explain
from hkv._identity import Need as Need
from hkv._identity import byte_codes as byte_codes
from hkv._identity import digest128 as digest128
from hkv._identity import media_digests as media_digests
from hkv._identity import need as need
from hkv._query import pad_batch as pad_batch
from hkv._query import query as query
from hkv._verify import Ask as Ask
from hkv._verify import check_abi as check_abi
from hkv._verify import check_block as check_block
from hkv._verify import check_bytes as check_bytes
from hkv._verify import check_groups as check_groups
from hkv._verify import verify_payload as verify_payload

# isort: split
# Route.
from hkv._route import Costs as Costs
from hkv._route import Plan as Plan
from hkv._route import costs as costs
from hkv._route import route as route

# isort: split
# Lease and admit.
from hkv._admit import Admission as Admission
from hkv._admit import Blocker as Blocker
from hkv._admit import Verdict as Verdict
from hkv._admit import admit as admit
from hkv._admit import fork as fork
from hkv._admit import lease as lease
from hkv._lease import Lease as Lease
from hkv._lease import check_lease as check_lease
from hkv._lease import release as release

# isort: split
# Read, write, recover.
from hkv._recover import recover as recover
from hkv._recover import verify_lease as verify_lease
from hkv._view import View as View
from hkv._view import append as append
from hkv._view import view as view

# isort: split
# Publish and give memory back.
from hkv._caps import set_caps as set_caps
from hkv._copies import Copies as Copies
from hkv._copies import Loading as Loading
from hkv._copies import adopt as adopt
from hkv._copies import begin_load as begin_load
from hkv._copies import end_load as end_load
from hkv._copies import load as load
from hkv._copies import offload as offload
from hkv._copies import offloaded as offloaded
from hkv._evict import drop as drop
from hkv._evict import invalidate as invalidate
from hkv._pages import occupancy as occupancy
from hkv._publish import publish as publish
from hkv._reindex import update_indexer as update_indexer
from hkv._retain import Retention as Retention
from hkv._retain import Worth as Worth
from hkv._retain import retention as retention
from hkv._room import evict as evict
from hkv._transition import transition as transition
from hkv._trim import trim as trim

# isort: split
# The host side.
from hkv.manager import Manager as Manager
from hkv.manager import Request as Request
from hkv.manager import Tier as Tier
