"""A convolutional network in Flax NNX, with logs inside of its modules: `python examples/flax_nnx.py`.

It learns to tell discs, squares, crosses and rings apart, which the program draws itself, with noise. The modules have
state, batch norm's statistics and dropout's random numbers, and they log. The same modules run in training and in
evaluation: `lox.scope` says which. What the model logs has no step, since it knows of none; the loop that counts the
steps adds it, and takes the logs of every tenth step only. They go to the console and to disk.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import lox

STEPS, EVERY, EVALUATE, BATCH = 300, 10, 50, 64
SHAPES = ["disc", "square", "cross", "ring"]


@functools.partial(jax.jit, static_argnums=1)
def draw(prng_key, number):
    """Return noisy pictures, each of 16 × 16 pixels with a shape somewhere in it, and the shapes' numbers."""
    kind_key, place_key, size_key, noise_key = jax.random.split(prng_key, 4)
    kind = jax.random.randint(kind_key, (number,), 0, len(SHAPES))
    place = jax.random.uniform(place_key, (2, number, 1, 1), minval=5.0, maxval=10.0)
    size = jax.random.uniform(size_key, (number, 1, 1), minval=3.0, maxval=5.0)
    x, y = jnp.abs(jnp.indices((16, 16))[:, None] - place)
    distance = jnp.sqrt(x**2 + y**2)
    disc, square = distance < size, jnp.maximum(x, y) < size
    cross, ring = square & (jnp.minimum(x, y) < 1), disc & (distance > size - 1.5)
    shape = jnp.take_along_axis(jnp.stack([disc, square, cross, ring]), kind[None, :, None, None], 0)[0]
    return (shape + 0.4 * jax.random.normal(noise_key, shape.shape))[..., None], kind


# --- the model -----------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, channels_in, channels_out, rngs):
        self.conv = nnx.Conv(channels_in, channels_out, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(channels_out, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        lox.log({"active": jnp.mean(x > 0)})
        return nnx.max_pool(self.dropout(x), (2, 2), (2, 2))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(1, 16, rngs), Block(16, 32, rngs)])
        self.out = nnx.Linear(32 * 4 * 4, len(SHAPES), rngs=rngs)

    def __call__(self, x):
        for number, block in enumerate(self.blocks):
            with lox.scope(f"block{number}"):
                x = block(x)
        return self.out(x.reshape(x.shape[0], -1))


def loss(model, pictures, kinds):
    logits = model(pictures)
    value = optax.softmax_cross_entropy_with_integer_labels(logits, kinds).mean()
    lox.log({"loss": value, "accuracy": jnp.mean(logits.argmax(-1) == kinds)})
    return value


@nnx.jit
def train_step(model, optimizer, pictures, kinds):
    with lox.scope("train"):
        grads = nnx.grad(loss)(model, pictures, kinds)
        lox.log({"grad_norm": optax.tree.norm(grads)})
    optimizer.update(model, grads)


@nnx.jit
def evaluate(model, pictures, kinds):
    with lox.scope("eval"):
        loss(model, pictures, kinds)


# --- the training --------------------------------------------------------------------------------


def main(directory="lox-flax-nnx"):
    prng_key = jax.random.key(0)
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)
    new = draw(jax.random.key(1), 512)

    console = lox.ConsoleLogger(progress={"step": STEPS})
    with lox.MultiLogger(console, lox.SaveLogger(directory, mode="overwrite")) as logger:
        run = logger.init(prng_key, config={"batch": BATCH, "optimizer": "adamw"})
        for step in range(STEPS + 1):
            if step % EVALUATE == 0:
                model.eval()  # no dropout, and the statistics stay as they are
                _, logs = lox.spool(evaluate)(model, *new)
                logger.log(run, logs, step=step)
            if step < STEPS:
                model.train()
                pictures = draw(jax.random.fold_in(prng_key, step), BATCH)
                _, logs = lox.spool(train_step)(model, optimizer, *pictures)
                if step % EVERY == 0:  # else they are dropped, and nothing has waited for them
                    logger.log(run, logs, step=step)

    # What `lox.spool` has run changed the modules as without it.
    assert all(jnp.any(block.norm.mean[...] != 0) for block in model.blocks) and optimizer.step[...] == STEPS

    logs = lox.load(directory, prng_key)
    print("\n                 loss              accuracy         active units in block 0 and 1")
    print("events        first     last    first     last    first     last    first     last")
    for scope in "train", "eval":
        curves = [logs[f"{scope}/{key}"] for key in ("loss", "accuracy", "block0/active", "block1/active")]
        print(f"{scope:5} {len(curves[0]):4}", *(f" {curve[0]:8.3f} {curve[-1]:8.3f}" for curve in curves), sep="")
    print(f"\nthe curves: lox ui {directory}")
    return logs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default="lox-flax-nnx", help="where the run goes (default: %(default)s)")
    main(**vars(parser.parse_args()))
