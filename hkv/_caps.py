"""Admission caps: what each form, group and tenant may occupy, in pages and in bytes.

Every cap is one row of weights over the groups and a limit on the weighted sum of used pages, so
pages, bytes and budgets that groups share are all the same thing to the functions that check them.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from hkv._arguments import check_type
from hkv._cache import Cache, cap_names, cap_unit, cap_weights, check_cache
from hkv._identity import tenant_word
from hkv._layout import DEVICE_FORMS, Form
from hkv._pages import used_pages
from hkv._slots import take


def set_caps(
    cache: Cache,
    pages: Mapping[Form | str, int] | None = None,
    *,
    bytes: Mapping[Form | str | tuple[str, ...], int] | None = None,
    tenant: str | None = None,
) -> Cache:
    """The cache with other caps; nothing compiles, and what is stored stays.

    Args:
        cache: the cache.
        pages: most pages that a device form may occupy over its groups, or a group by name.
        bytes: the same in bytes over the layers; a tuple of group names is one budget that these
            groups share, in place of the one before (at first: all groups, the size of the pools).
        tenant: whose caps these are, by salt; without one, everybody's together. A layout has
            `tenants` places for them.

    Raises:
        TypeError: no mappings.
        ValueError: an unknown form, group or tenant place, or a number out of range.
    """
    check_cache(cache)
    lay, caps = cache.layout, jax.device_get(cache.caps)
    names = cap_names(lay)
    limit, weight, owner = (np.array(a) for a in (caps.limit, caps.weight, caps.tenant))
    t = 0
    if tenant is not None:
        check_type("tenant", tenant, str)
        word = tenant_word(tenant)
        places = np.flatnonzero((owner == word) | (owner == 0))
        if not len(places):
            raise ValueError(
                f"`tenant` is {tenant!r}; all {lay.tenants} places of the layout are taken"
            )
        mine = np.flatnonzero(owner == word)
        t = 1 + int(mine[0] if len(mine) else places[0])
        owner[t - 1] = word
    groups = [g.name for g in lay.groups]
    for name, numbers in (("pages", pages), ("bytes", bytes)):
        if numbers is None:
            continue
        check_type(name, numbers, Mapping)
        for what, n in numbers.items():
            if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0:
                raise ValueError(f"`{name}` gives {n!r} for {what!r}; give 0 or more")
            if isinstance(what, Form) and what in DEVICE_FORMS:
                k = names.index((what.name, name))
                n = n // cap_unit(lay) if name == "bytes" else n
            elif isinstance(what, str) and what in groups:
                k = names.index((what, "pages"))
                n = n // lay.groups[groups.index(what)].page_bytes if name == "bytes" else n
            elif name == "bytes" and isinstance(what, tuple) and what and {*what} <= {*groups}:
                if t:
                    raise ValueError("`bytes` shares a budget for one tenant; share it for all")
                k = names.index(("shared", "bytes"))
                inside = np.array([g in what for g in groups])
                weight[k] = np.where(inside, cap_weights(lay)[k], 0)
                n = n // cap_unit(lay)
            else:
                raise ValueError(
                    f"`{name}` names {what!r}; give device forms {list(DEVICE_FORMS)} or groups "
                    f"{groups}{', or a tuple of groups' if name == 'bytes' else ''}"
                )
            limit[t, k] = min(n, 2**30)
    new = dataclasses.replace(caps, limit=limit, weight=weight, tenant=owner)
    # Committed to a device only where it was: that is part of what a compiled program expects.
    to = cache.clock.sharding if cache.clock.committed else None
    return dataclasses.replace(cache, caps=jax.device_put(new, to))


def usage(cache: Cache) -> jax.Array:
    """`i32[1 + T, K]`: what is used of each cap, by everybody and by each tenant."""
    used = used_pages(cache)[None]
    if cache.layout.tenants:
        t, N = cache.table, cache.layout.segments
        stored = jnp.stack([jnp.sum(p > 0, axis=1, dtype=jnp.int32) for p in t.pages], axis=1)
        whose = cache.caps.tenant[:, None]
        by_row = jnp.where((t.tenant[None] == whose)[..., None], stored[None], 0)
        private = []
        for pool in cache.pools:
            slot = jnp.where(pool.owner > N, pool.owner - N - 1, cache.layout.leases)
            mine = take(cache.tenants, slot, 0)[None] == whose
            private.append(jnp.sum(mine & (slot < cache.layout.leases)[None], 1, dtype=jnp.int32))
        each = jnp.sum(by_row, axis=1, dtype=jnp.int32) + jnp.stack(private, axis=1)
        used = jnp.concatenate([used, each])
    return weighed(cache, used)


def weighed(cache: Cache, pages: jax.Array) -> jax.Array:
    """`i32[..., K]`: pages `i32[..., G]` in the unit of each cap."""
    return pages @ cache.caps.weight.T


def charged(cache: Cache, tenant: jax.Array) -> jax.Array:
    """`bool[1 + T]`: which rows of limits a request of `tenant` `u32[]` counts against."""
    mine = (cache.caps.tenant == tenant) & (tenant != 0)
    return jnp.concatenate([jnp.ones(1, bool), mine])
