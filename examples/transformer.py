"""A character-level transformer on eight devices, with logs inside of its layers: `python examples/transformer.py`.

It is written as large ones are: the layers are stacked and run by `lax.scan`, `jax.checkpoint` computes each again in
the backward pass instead of keeping its activations, the batch is spread over the devices, and the buffers of the old
parameters are donated to the new ones. Logging takes no part in any of this: a layer logs its activations and its
attention, the loss is logged inside of the gradient, and the gradient's norm outside. In the end it is checked that
every layer has logged exactly once per step, in order.
"""

import argparse
import functools
import os
from pathlib import Path

# Before JAX is imported: eight devices out of one CPU. Where there are GPUs, these are used, however many they are.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lox

LAYERS, WIDTH, HEADS, CONTEXT = 4, 64, 4, 64
BATCH, STEPS = 16, 250

# "The House That Jack Built" goes from each thing back to the first, so that there is something to attend to.
THINGS = [
    "the house that Jack built",
    "the malt that lay in",
    "the rat that ate",
    "the cat that killed",
    "the dog that worried",
    "the cow with the crumpled horn that tossed",
    "the maiden all forlorn that milked",
    "the man all tattered and torn that kissed",
    "the priest all shaven and shorn that married",
    "the cock that crowed in the morn that woke",
    "the farmer sowing his corn that kept",
]
TEXT = "".join(f"This is {' '.join(reversed(THINGS[: n + 1]))}.\n" for n in range(len(THINGS)))
ALPHABET = sorted(set(TEXT))
TOKENS = np.array([ALPHABET.index(letter) for letter in TEXT])


# --- the model -----------------------------------------------------------------------------------


def init(prng_key):
    def layer(prng_key):
        keys = jax.random.split(prng_key, 4)
        deep = (2 * LAYERS) ** -0.5  # so many things are added up
        return {
            "qkv": jax.random.normal(keys[0], (WIDTH, 3 * WIDTH)) * WIDTH**-0.5,
            "out": jax.random.normal(keys[1], (WIDTH, WIDTH)) * WIDTH**-0.5 * deep,
            "up": jax.random.normal(keys[2], (WIDTH, 4 * WIDTH)) * WIDTH**-0.5,
            "down": jax.random.normal(keys[3], (4 * WIDTH, WIDTH)) * (4 * WIDTH) ** -0.5 * deep,
        }

    letters_key, places_key, layers_key = jax.random.split(prng_key, 3)
    return {
        "letters": 0.05 * jax.random.normal(letters_key, (len(ALPHABET), WIDTH)),
        "places": 0.05 * jax.random.normal(places_key, (CONTEXT, WIDTH)),
        "layers": jax.vmap(layer)(jax.random.split(layers_key, LAYERS)),  # stacked, for `lax.scan`
    }


def normalize(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def attend(params, x):
    """Return what the heads have gathered, and the mean entropy of their attention, in bits."""
    batch, length, _ = x.shape
    q, k, v = jnp.moveaxis((x @ params["qkv"]).reshape(batch, length, 3, HEADS, WIDTH // HEADS), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5
    scores = jnp.where(jnp.tri(length, dtype=bool), scores, -1e9)  # letters see what is before them
    weights = jax.nn.softmax(scores)
    entropy = -jnp.mean(jnp.sum(weights * jnp.log2(weights + 1e-9), -1))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ params["out"], entropy


def predict(params, tokens, step):
    """Return logits of the next letter, at every place."""

    @jax.checkpoint
    def layer(x, numbered):
        number, weights = numbered
        gathered, entropy = attend(weights, normalize(x))
        x = x + gathered
        x = x + jax.nn.gelu(normalize(x) @ weights["up"]) @ weights["down"]
        norm = jnp.mean(jnp.linalg.norm(x, axis=-1))
        lox.log({"layers/norm": norm, "layers/attention_entropy": entropy}, step=step, layer=number)
        return x, None

    x = params["letters"][tokens] + params["places"][: tokens.shape[1]]
    x, _ = jax.lax.scan(layer, x, (jnp.arange(LAYERS), params["layers"]))
    return normalize(x) @ params["letters"].T


# --- the training --------------------------------------------------------------------------------


def loss(params, batch, step):
    logits = predict(params, batch[:, :-1], step)
    value = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()
    lox.log({"loss": value}, step=step)
    return value


optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0.0, 6e-3, 20, STEPS))


def train_step(params, moments, batch, step):
    grads = jax.grad(loss)(params, batch, step)
    lox.log({"grad_norm": optax.tree.norm(grads)}, step=step)
    updates, moments = optimizer.update(grads, moments)
    return optax.apply_updates(params, updates), moments


def batches(sharding):
    """Yield pieces of the text from random places, spread over the devices."""
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        begins = rng.integers(len(TOKENS) - CONTEXT, size=(BATCH, 1))
        yield step, jax.device_put(TOKENS[begins + np.arange(CONTEXT + 1)], sharding)


def continue_text(params, text, length):
    """Append the most likely letters, one after the other. It uses the model too, but its logs are of no interest."""

    def letter(tokens, end):
        # Letters that are not there yet cannot be seen, because of the mask.
        logits = lox.nolog(predict)(params, tokens[None], 0)
        return tokens.at[end].set(jnp.argmax(logits[0, end - 1])), None

    begin = [ALPHABET.index(letter) for letter in text]
    tokens = jnp.zeros(CONTEXT, int).at[: len(begin)].set(jnp.array(begin))
    tokens, _ = jax.jit(lambda tokens: jax.lax.scan(letter, tokens, jnp.arange(len(begin), length)))(tokens)
    return "".join(ALPHABET[n] for n in tokens[:length])


def main(directory="lox-transformer"):
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))  # XLA chooses the communication
    everywhere, spread = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("data")))

    prng_key = jax.random.key(0)
    saved = lox.SaveLogger(directory, mode="overwrite")
    with lox.MultiLogger(saved, lox.ConsoleLogger(progress={"step": STEPS})) as logger:
        run = logger.init(prng_key, config={"layers": LAYERS, "width": WIDTH, "devices": jax.device_count()})

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def logged_step(params, moments, batch, step):
            return logger.tap(train_step, run)(params, moments, batch, step)

        first = params = jax.device_put(init(prng_key), everywhere)
        moments = jax.device_put(optimizer.init(params), everywhere)
        for step, batch in batches(spread):
            params, moments = logged_step(params, moments, batch, step)
    assert all(x.is_deleted() for x in jax.tree.leaves(first))  # their buffers were used again

    logs = lox.load(directory, prng_key)
    # `jax.checkpoint` has computed each layer twice. The second time is no event.
    assert logs.step["layers/norm"].tolist() == np.repeat(np.arange(STEPS), LAYERS).tolist()
    assert logs.layer["layers/norm"].tolist() == np.tile(np.arange(LAYERS), STEPS).tolist()
    count = len(logs["layers/norm"])
    print(f"\n{STEPS} steps × {LAYERS} layers: {count} events of a key, each layer once per step, in order")

    layers = [logs.filter("layers/*").slice[n::LAYERS] for n in range(LAYERS)]
    print("\nstep   loss  |grad|   norm after each layer        attention of each layer, in bits")
    for step in [*range(0, STEPS, 50), STEPS - 1]:
        norms, bits = (" ".join(f"{layer[key][step]:6.2f}" for layer in layers) for key in layers[0])
        print(f"{step:4} {logs['loss'][step]:6.3f} {logs['grad_norm'][step]:7.3f}  {norms}  {bits}")

    print(f"\nit goes on from 'This is the cow': {continue_text(params, 'This is the cow', CONTEXT)!r}")
    by_layer = lox.plot({f"layer {n}": layer for n, layer in enumerate(layers)})
    print(f"\nthe curves: lox ui {directory}; layer by layer: {by_layer.save(Path(directory, 'layers.html'))}")
    return logs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default="lox-transformer", help="where the run goes (default: %(default)s)")
    main(**vars(parser.parse_args()))
