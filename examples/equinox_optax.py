"""A recurrent network in Equinox, trained with Optax on micro-batches: `python examples/equinox_optax.py`.

The training is a Python loop around a compiled step. A step adds up the gradients of four micro-batches, in a `scan`.
Their sequences have different lengths, so that each of their losses is the mean of another number of values: `weight=`
says of how many, and `reduce="mean"` makes one event of them, the mean over all values of the batch. The learning rate
is logged by the schedule, when the optimizer asks for it. `lox.watch` is there for the day when something is not a
number; what that looks like is shown in the end.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import lox

STEPS, MICRO, BATCH, LENGTH, SHOWN = 300, 4, 16, 40, 50


def waves(rng):
    """Return noisy sine waves, (micro-batch, sequence, time), and which of their values are there."""
    time = np.arange(LENGTH + 1)
    frequency, phase = rng.uniform(0.2, 0.8, (MICRO, BATCH, 1)), rng.uniform(0, 2 * np.pi, (MICRO, BATCH, 1))
    values = np.sin(frequency * time + phase) + 0.05 * rng.normal(size=(MICRO, BATCH, LENGTH + 1))
    there = time[1:] < rng.integers(8, LENGTH, size=(MICRO, BATCH, 1))
    return values.astype(np.float32), there


# --- the model -----------------------------------------------------------------------------------


class Model(eqx.Module):
    cell: eqx.nn.GRUCell
    out: eqx.nn.Linear

    def __init__(self, prng_key):
        cell_key, out_key = jax.random.split(prng_key)
        self.cell = eqx.nn.GRUCell(1, 32, key=cell_key)
        self.out = eqx.nn.Linear(32, 1, key=out_key)

    def __call__(self, values):
        """Predict, after each value, the next one."""

        def step(hidden, value):
            hidden = self.cell(value[None], hidden)
            return hidden, self.out(hidden)[0]

        return jax.lax.scan(step, jnp.zeros(32), values)[1]


def loss(model, values, there, step):
    """Return the mean squared error over the values that are there, and how many they are."""
    errors = jnp.where(there, jax.vmap(model)(values[:, :-1]) - values[:, 1:], 0.0)
    number = jnp.sum(there)
    value = jnp.sum(errors**2) / number
    lox.log({"loss": value}, reduce="mean", weight=number, step=step)
    lox.log({"largest_error": jnp.max(jnp.abs(errors))}, reduce="max", step=step)
    return value, number


# --- the training --------------------------------------------------------------------------------


def learning_rate(step):
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 20, STEPS)(step)
    lox.log({"learning_rate": rate}, step=step)
    return rate


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))


@eqx.filter_jit
def train_step(model, moments, batch, step):
    def micro_step(total, micro_batch):
        (_, number), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model, *micro_batch, step)
        return jax.tree.map(lambda t, g: t + number * g, total, grads), number

    zeros = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_array))
    total, numbers = jax.lax.scan(micro_step, zeros, batch)
    grads = jax.tree.map(lambda t: t / numbers.sum(), total)
    lox.log({"grad_norm": optax.tree.norm(grads), "values": numbers.sum()}, step=step)
    changes, moments = optimizer.update(grads, moments)
    return eqx.apply_updates(model, changes), moments


def main(directory="lox-equinox-optax"):
    prng_key, rng = jax.random.key(0), np.random.default_rng(0)
    model = Model(prng_key)
    moments = optimizer.init(eqx.filter(model, eqx.is_array))
    logged_step = lox.spool(lox.watch(train_step))

    print("step     loss  largest error  learning rate   |grad|  values")
    with lox.SaveLogger(directory, mode="overwrite") as logger:
        run = logger.init(prng_key, config={"batch": MICRO * BATCH})
        for step in range(STEPS):
            batch, before = waves(rng), model
            # The step as an array: `filter_jit` compiles once more for every Python number.
            (model, moments), logs = logged_step(model, moments, batch, jnp.int32(step))
            logger.log(run, logs)
            if step % SHOWN == 0 or step == STEPS - 1:
                shown = (logs[key] for key in ("loss", "largest_error", "learning_rate", "grad_norm", "values"))
                print("{:4} {:8.5f} {:14.3f} {:14.5f} {:8.4f} {:7}".format(step, *shown), flush=True)

    whole, _ = lox.nolog(loss)(before, *(x.reshape(-1, x.shape[-1]) for x in batch), step)
    assert jnp.allclose(logs["loss"], whole, rtol=1e-5)
    print(f"\nthe last loss: {logs['loss']:.6f} from {MICRO} micro-batches, {whole:.6f} from all values at once")

    print("\nand if there is nothing to predict in a micro-batch:")
    _, there = batch
    there[2] = False
    try:
        logged_step(model, moments, batch, jnp.int32(STEPS))
    except lox.NonFiniteError as error:
        print(error)
    else:
        raise AssertionError("a mean of nothing is not a number, and was not noticed")
    print(f"\nthe curves: lox ui {directory}")
    return lox.load(directory, prng_key)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default="lox-equinox-optax", help="where the run goes (default: %(default)s)")
    main(**vars(parser.parse_args()))
