"""A cache view of plain arrays, simple enough to be the oracle of the paged one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["position", "count", "rows", "poison"],
    meta_fields=["length", "units"],
)
@dataclasses.dataclass(frozen=True)
class DenseView:
    """One array per group and layer, with a row for every unit of `length` tokens.

    `poison` fills every row that is not valid, which no result may depend on.
    """

    position: jax.Array
    count: jax.Array
    rows: dict
    poison: jax.Array
    length: int
    units: tuple

    @classmethod
    def empty(cls, groups, requests, length, poison=0.0):
        units = tuple((group.name, group.rule.unit) for group in groups)
        rows = {
            (group.name, layer): jnp.full(
                (requests, length // group.rule.unit, *group.row), poison, group.dtype
            )
            for group in groups
            for layer in group.layers
        }
        zero = jnp.zeros(requests, jnp.int32)
        return cls(zero, zero, rows, jnp.float32(poison), length, units)

    def at(self, position, count):
        """This view for the next chunk; ints stand for all requests."""
        position, count = (
            jnp.broadcast_to(jnp.asarray(a, jnp.int32), self.position.shape)
            for a in (position, count)
        )
        return dataclasses.replace(self, position=position, count=count)

    def _real(self, group, index):
        end = (self.position + self.count)[:, None]
        return (index >= 0) & ((index + 1) * dict(self.units)[group] - 1 < end)

    def read(self, group, layer, index, new):
        stored = self.write(group, layer, new).rows[group, layer]
        rows = jax.vmap(lambda a, i: a.at[i].get(mode="clip"))(stored, index)
        valid = self._real(group, index)
        mask = valid.reshape(*valid.shape, *(1 for _ in rows.shape[2:]))
        return jnp.where(mask, rows, self.poison.astype(rows.dtype)), valid

    def write(self, group, layer, new):
        first = self.position // dict(self.units)[group]
        index = first[:, None] + jnp.arange(new.shape[1], dtype=jnp.int32)[None]
        index = jnp.where(self._real(group, index), index, self.length)
        old = self.rows[group, layer]
        rows = jax.vmap(lambda a, i, v: a.at[i].set(v, mode="drop"))(
            old, index, new.astype(old.dtype)
        )
        return dataclasses.replace(self, rows={**self.rows, (group, layer): rows})
