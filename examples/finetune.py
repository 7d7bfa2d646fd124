"""Training changes the weights; what was stored with the old ones is refused, by name.

    python examples/finetune.py

Stores prompts, takes a few optax steps on the checkpoint, raises the epoch, and asks again.
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from serving import Server, layout_of, progress, table

import hkv
from hkv.models.deepseek_v4 import DeepseekV4
from hkv.nn import bind

HERE = Path(__file__).parent
TOKENS, REQUESTS, STEPS = 256, 3, 3  # of training


def train(model: DeepseekV4, server: Server, batch: np.ndarray) -> list[float]:
    """A few steps of Adam on `batch` `i32[Q, T]`; returns the loss before each, nats per byte."""
    tokens = jnp.asarray(batch)
    lease = server.start([[]] * REQUESTS, [TOKENS] * REQUESTS).lease  # requests without a past
    count = jnp.full(REQUESTS, TOKENS, jnp.int32)
    optimizer = nnx.Optimizer(model, optax.adam(3e-4), wrt=nnx.Param)

    def loss(model, cache):
        logits, _ = model(tokens, hkv.view(cache, lease, count))
        nats = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return jnp.mean(nats)

    @nnx.jit
    def step(model, optimizer, cache):
        value, gradients = nnx.value_and_grad(loss)(model, cache)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer, server.cache)) for _ in range(STEPS)]
    server.finish(lease)
    return losses


def ask(server: Server, prompts):
    """Availability, plan and last logits of prompts; published if anything was computed."""
    run = server.start(prompts, [len(p) for p in prompts])
    server.finish(run.lease, prompts)
    return run.availability, run.plan, np.stack([x[-1] for x in run.logits])


def show(title: str, availability, plan) -> None:
    """The first request's table, and the plan and the reasons of all."""
    print(f"\n{title}")
    print("\n".join(f"  {line}" for line in table(availability, 0)))
    print("\n".join(f"  {line}" for line in (*hkv.explain(availability), repr(plan))))


def near(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal up to rounding."""
    return bool(np.abs(a - b).max() <= 1e-5 * np.abs(b).max())


def main() -> int:
    """Shows it; 1 if anything is not as it should be."""
    text = np.frombuffer((HERE / "data" / "shakespeare.txt").read_bytes(), np.uint8)
    prompts = [text[a : a + n].tolist() for a, n in ((700, 200), (2600, 150), (3000, 96))]
    batch = text[4000 : 4000 + REQUESTS * TOKENS].astype(np.int32).reshape(REQUESTS, TOKENS)
    model = DeepseekV4.load(HERE / "checkpoints" / "dsv4")
    layout = layout_of(model, 1024, REQUESTS)
    server = Server(model, layout, REQUESTS, epoch=0)

    with progress("compiling, and running the prompts with the old weights"):
        _, _, cold_0 = ask(server, prompts)
        before, plan, old = ask(server, prompts)
    show("Epoch 0, asked again: reused", before, plan)

    with progress("training"):
        losses = train(model, server, batch)
    print(f"\n{STEPS} steps of Adam: {' -> '.join(f'{x:.3f}' for x in losses)} nats per byte")
    server.weights = bind(model)[0]
    server.need = hkv.need(server.cache, requests=REQUESTS, epoch=1)

    refused, plan, cold_1 = ask(server, prompts)
    show("Epoch 1: refused, run cold and stored", refused, plan)
    after, plan_1, new = ask(server, prompts)
    show("Epoch 1, asked again: reused", after, plan_1)

    stored = np.asarray(refused.rows) < layout.segments
    reasons = np.asarray(refused.group_reason)[stored]
    print()
    facts = {
        "the old run was reused and right": bool(before.boundary.min() > 0) and near(old, cold_0),
        "training changed the logits": not near(cold_1, cold_0),
        "every old segment is refused for its epoch": bool(
            stored.any() and (reasons == hkv.Reason.EPOCH).all()
        ) and not np.asarray(plan.resume).any(),
        "the new run was reused and right": bool(after.boundary.min() > 0) and near(new, cold_1),
    }  # fmt: skip
    for fact, holds in facts.items():
        print(f"{'yes' if holds else 'NO':4} {fact}")
    right = all(facts.values())
    print(f"summary: {int(stored.sum())} segments of epoch 0 refused, "
          f"{'and' if right else 'but NOT'} the rest as it should be")  # fmt: skip
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
