"""The program that is measured: a small MLP trained with SGD, three metrics per step.

It comes in three versions: with a call that logs, with metrics threaded through by hand, and without
metrics. Inner functions are made at every trace: JAX caches the jaxpr of a loop's body by the
identity of its function, so tracing would otherwise be measured only once. Nothing here needs lox:
what lox is compared with may need a JAX that is too old for it.
"""

import itertools

import jax
import jax.numpy as jnp

SIZES = (16, 64, 64, 4)
BATCH, STEPS, EPOCHS, SEEDS = 32, 50, 4, 8


def init(prng_key):
    layers = []
    for n_in, n_out in itertools.pairwise(SIZES):
        prng_key, layer_key = jax.random.split(prng_key)
        layers.append((jax.random.normal(layer_key, (n_in, n_out)) / n_in**0.5, jnp.zeros(n_out)))
    return layers


def data(prng_key):
    x = jax.random.normal(prng_key, (STEPS, BATCH, SIZES[0]))
    return x, jnp.argmax(x[..., : SIZES[-1]], -1)


def loss_and_accuracy(params, batch):
    x, label = batch
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    logits = x @ w + b
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], 1)
    return -jnp.mean(chosen), jnp.mean(jnp.argmax(logits, -1) == label)


def sgd(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def norm(grads):
    return jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))


# --- logged: each metric goes to `log`, such as `lox.log`, where it is computed ------------------


def logged(log, params, batches):
    def loss_fn(params, batch):
        loss, accuracy = loss_and_accuracy(params, batch)
        log({"loss": loss, "accuracy": accuracy})
        return loss

    def step(params, batch):
        grads = jax.grad(loss_fn)(params, batch)
        log({"grad_norm": norm(grads)})
        return sgd(params, grads), None

    return jax.lax.scan(step, params, batches)[0]


def logged_nested(log, params, batches):
    return jax.lax.scan(lambda p, _: (logged(log, p, batches), None), params, length=EPOCHS)[0]


# --- by hand: the metrics go through `has_aux` and the outputs of every loop ---------------------


def by_hand(params, batches):
    def loss_fn(params, batch):
        loss, accuracy = loss_and_accuracy(params, batch)
        return loss, {"loss": loss, "accuracy": accuracy}

    def step(params, batch):
        grads, metrics = jax.grad(loss_fn, has_aux=True)(params, batch)
        return sgd(params, grads), {**metrics, "grad_norm": norm(grads)}

    return jax.lax.scan(step, params, batches)


def by_hand_nested(params, batches):
    params, metrics = jax.lax.scan(lambda p, _: by_hand(p, batches), params, length=EPOCHS)
    return params, jax.tree.map(jnp.concatenate, metrics)  # one axis of events, as with lox


# --- without: `logged` with its log lines deleted ------------------------------------------------


def plain(params, batches):
    def loss_fn(params, batch):
        loss, _ = loss_and_accuracy(params, batch)
        return loss

    def step(params, batch):
        grads = jax.grad(loss_fn)(params, batch)
        return sgd(params, grads), None

    return jax.lax.scan(step, params, batches)[0]
