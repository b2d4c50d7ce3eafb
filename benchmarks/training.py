"""The program that is measured: a small MLP trained with SGD, three metrics per step.

Three times the same: logged with lox, with the metrics threaded through by hand, and with none.
The functions inside are made anew at every trace: JAX caches the jaxpr of a loop's body by the
identity of its function, and tracing would otherwise be measured once and never again.
"""

import itertools

import jax
import jax.numpy as jnp

import lox

SIZES = (16, 64, 64, 4)
BATCH, STEPS, EPOCHS, SEEDS = 32, 50, 4, 8


def init(key):
    layers = []
    for n_in, n_out in itertools.pairwise(SIZES):
        key, sub = jax.random.split(key)
        layers.append((jax.random.normal(sub, (n_in, n_out)) / n_in**0.5, jnp.zeros(n_out)))
    return layers


def data(key):
    x = jax.random.normal(key, (STEPS, BATCH, SIZES[0]))
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


# --- with lox: each metric is logged where it is known -------------------------------------------


def logged(params, batches):
    def loss_fn(params, batch):
        loss, accuracy = loss_and_accuracy(params, batch)
        lox.log({"loss": loss, "accuracy": accuracy})
        return loss

    def step(params, batch):
        grads = jax.grad(loss_fn)(params, batch)
        lox.log({"grad_norm": norm(grads)})
        return sgd(params, grads), None

    return jax.lax.scan(step, params, batches)[0]


def logged_nested(params, batches):
    return jax.lax.scan(lambda p, _: (logged(p, batches), None), params, length=EPOCHS)[0]


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


# --- without: `logged`, its log lines deleted ----------------------------------------------------


def plain(params, batches):
    def loss_fn(params, batch):
        loss, _ = loss_and_accuracy(params, batch)
        return loss

    def step(params, batch):
        grads = jax.grad(loss_fn)(params, batch)
        return sgd(params, grads), None

    return jax.lax.scan(step, params, batches)[0]
