"""PPO on a cart with a pole, in plain JAX: the training that `ppo_sweep.py` and the examples of trackers share.

Everything is compiled, and everything is logged where it is computed: episode lengths in the training loop, losses in
the loss function, gradients where they are taken. `train` does not know where its logs go.
"""

import itertools

import jax
import jax.numpy as jnp

import lox

SEEDS, UPDATES, STEPS, ENVS, EPOCHS = 8, 10, 64, 8, 2
DISCOUNT, TRACE, CLIP = 0.99, 0.95, 0.2


# --- the environment -----------------------------------------------------------------------------


def env_step(prng_key, state, action):
    """Simulate 20 ms of position, velocity, angle and its velocity. An episode ends when the pole has fallen."""
    x, dx, angle, d_angle = state
    force = jnp.where(action == 1, 10.0, -10.0)
    swing = (force + 0.05 * d_angle**2 * jnp.sin(angle)) / 1.1
    dd_angle = (9.8 * jnp.sin(angle) - jnp.cos(angle) * swing) / (0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1))
    ddx = swing - 0.05 * dd_angle * jnp.cos(angle) / 1.1
    moved = jnp.stack([x + 0.02 * dx, dx + 0.02 * ddx, angle + 0.02 * d_angle, d_angle + 0.02 * dd_angle])
    fallen = (jnp.abs(moved[0]) > 2.4) | (jnp.abs(moved[2]) > 0.2)
    return jnp.where(fallen, env_reset(prng_key), moved), fallen


def env_reset(prng_key):
    return jax.random.uniform(prng_key, (4,), minval=-0.05, maxval=0.05)


# --- the agent -----------------------------------------------------------------------------------


def init(prng_key):
    sizes = (4, 32, 32, 3)  # two actions, and the value
    prng_keys = jax.random.split(prng_key, len(sizes) - 1)
    return [
        (jax.random.normal(k, (i, o)) * (1 / i) ** 0.5, jnp.zeros(o))
        for k, (i, o) in zip(prng_keys, itertools.pairwise(sizes), strict=True)
    ]


def policy_and_value(params, state):
    for w, b in params[:-1]:
        state = jnp.tanh(state @ w + b)
    w, b = params[-1]
    out = state @ w + b
    return jax.nn.log_softmax(out[..., :2]), out[..., 2]


def rollout(params, states, prng_key):
    def step(states, prng_key):
        act_key, env_key = jax.random.split(prng_key)
        logp, value = policy_and_value(params, states)
        action = jax.random.categorical(act_key, logp)
        after, fallen = jax.vmap(env_step)(jax.random.split(env_key, ENVS), states, action)
        chosen = jnp.take_along_axis(logp, action[:, None], 1)[:, 0]
        return after, (states, action, chosen, value, fallen)

    return jax.lax.scan(step, states, jax.random.split(prng_key, STEPS))


def advantages(values, fallen, last_value):
    """Generalised advantage estimation. The reward is `1 - DISCOUNT` as long as the pole stands.

    So values are at most 1. The gradients of larger ones would drown those of the policy, which has the same layers.
    """

    def back(carry, step):
        next_value, trace = carry
        value, fallen = step
        goes_on = 1.0 - fallen
        trace = 1.0 - DISCOUNT + DISCOUNT * next_value * goes_on - value + DISCOUNT * TRACE * goes_on * trace
        return (value, trace), trace

    start = (last_value, jnp.zeros_like(last_value))
    return jax.lax.scan(back, start, (values, fallen.astype(jnp.float32)), reverse=True)[1]


def loss(params, batch, step):
    states, action, old_logp, advantage, target = batch
    logp, value = policy_and_value(params, states)
    ratio = jnp.exp(jnp.take_along_axis(logp, action[:, None], 1)[:, 0] - old_logp)
    normal = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss = -jnp.mean(jnp.minimum(ratio * normal, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * normal))
    value_loss = jnp.mean((value - target) ** 2)
    entropy = -jnp.mean(jnp.sum(jnp.exp(logp) * logp, -1))
    lox.log({"loss/policy": policy_loss, "loss/value": value_loss, "entropy": entropy}, step=step)
    return policy_loss + 0.5 * value_loss - 0.01 * entropy


def adam(grads, moments, count, rate):
    first, second = moments
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda m, g: 0.999 * m + 0.001 * g**2, second, grads)
    scale = jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    return jax.tree.map(lambda m, v: -rate * scale * m / (jnp.sqrt(v) + 1e-8), first, second), (first, second)


def heat_map(states):
    """Draw how often each position and angle was visited."""
    visits, _, _ = jnp.histogram2d(states[:, 0], states[:, 2], 24, range=jnp.array([[-2.4, 2.4], [-0.2, 0.2]]))
    return lox.Image(jnp.sqrt(visits / jnp.maximum(visits.max(), 1.0)))


def train(prng_key, learning_rate=3e-3, updates=UPDATES):
    """Train one agent from its PRNG key; return how long episodes lasted."""
    init_key, env_key, loop_key = jax.random.split(prng_key, 3)
    params = init(init_key)
    zeros = jax.tree.map(jnp.zeros_like, params)
    states = jax.vmap(env_reset)(jax.random.split(env_key, ENVS))

    def update(carry, number):
        params, moments, states = carry
        states, (seen, action, logp, value, fallen) = rollout(params, states, jax.random.fold_in(loop_key, number))
        frames = (number + 1) * STEPS * ENVS
        episode = STEPS * ENVS / jnp.maximum(fallen.sum(), 1)
        lox.log({"episode_length": episode}, step=number * EPOCHS, frames=frames)
        advantage = advantages(value, fallen, policy_and_value(params, states)[1])
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (seen, action, logp, advantage, advantage + value))

        def epoch(carry, step):
            params, moments = carry
            grads = jax.grad(loss)(params, batch, step)
            lox.log({"gradients": lox.Histogram(grads)}, step=step)
            change, moments = adam(grads, moments, step + 1, learning_rate)
            return (jax.tree.map(jnp.add, params, change), moments), None

        (params, moments), _ = jax.lax.scan(epoch, (params, moments), number * EPOCHS + jnp.arange(EPOCHS))
        lox.log({"visited": heat_map(batch[0])}, step=number * EPOCHS)
        return (params, moments, states), episode

    return jax.lax.scan(update, (params, (zeros, zeros), states), jnp.arange(updates))[1]
