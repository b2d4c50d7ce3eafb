"""A small PPO in plain JAX, for the examples of trackers: a point on a line learns to go to the middle and stay there.

It knows nothing of trackers. Metrics are logged with `lox.log` where they are known.
"""

import jax
import jax.numpy as jnp

import lox

SEEDS, UPDATES, ENVS, HORIZON, EPOCHS = 8, 20, 16, 32, 4


def init(key):
    """A Gaussian policy and a value function, both linear in three features of the state."""
    return {"mean": 0.1 * jax.random.normal(key, (3,)), "log_std": jnp.zeros(()), "value": jnp.zeros(3)}


def features(state):
    position, speed = state
    return jnp.stack([position, speed, jnp.ones_like(position)], -1)


def log_prob(params, seen, action):
    std = jnp.exp(params["log_std"])
    return -0.5 * ((action - seen @ params["mean"]) / std) ** 2 - params["log_std"]


def rollout(params, key):
    def act(state, key):
        noise_key, reset_key = jax.random.split(key)
        seen = features(state)
        action = seen @ params["mean"] + jnp.exp(params["log_std"]) * jax.random.normal(noise_key, (ENVS,))
        position, speed = state
        speed = 0.9 * speed + 0.1 * jnp.clip(action, -1, 1)
        position = position + speed
        reward = -jnp.abs(position)
        lost = jnp.abs(position) > 3
        start = jax.random.uniform(reset_key, (ENVS,), minval=-1, maxval=1)
        state = jnp.where(lost, start, position), jnp.where(lost, 0.0, speed)
        return state, (seen, action, log_prob(params, seen, action), reward, lost)

    start_key, key = jax.random.split(key)
    start = jax.random.uniform(start_key, (ENVS,), minval=-1, maxval=1), jnp.zeros(ENVS)
    last, steps = jax.lax.scan(act, start, jax.random.split(key, HORIZON))
    return steps, features(last) @ params["value"]


def advantages(values, last_value, rewards, lost, discount=0.95, trace=0.9):
    def back(carry, step):
        later, next_value = carry
        value, reward, ended = step
        going_on = 1.0 - ended
        delta = reward + discount * next_value * going_on - value
        later = delta + discount * trace * going_on * later
        return (later, value), later

    return jax.lax.scan(back, (jnp.zeros(ENVS), last_value), (values, rewards, lost), reverse=True)[1]


def train(key, learning_rate, updates=UPDATES):
    """Train one policy from its seed."""

    def update(params, number):
        (seen, action, old, reward, lost), last_value = rollout(params, jax.random.fold_in(key, number))
        values = seen @ params["value"]
        advantage = advantages(values, last_value, reward, lost.astype(jnp.float32))
        target = advantage + values
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)

        def loss(params):
            ratio = jnp.exp(log_prob(params, seen, action) - old)
            clipped = jnp.clip(ratio, 0.8, 1.2)
            policy = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
            value = jnp.square(seen @ params["value"] - target).mean()
            lox.log({"loss/policy": policy, "loss/value": value}, step=number)
            return policy + 0.5 * value

        def epoch(params, _):
            grads = jax.grad(loss)(params)
            return jax.tree.map(lambda p, g: p - learning_rate * jnp.clip(g, -1, 1), params, grads), None

        params, _ = jax.lax.scan(epoch, params, length=EPOCHS)
        lox.log(
            {"return": reward.sum(0).mean(), "std": jnp.exp(params["log_std"]), "mean": params["mean"]}, step=number
        )
        return params, None

    return jax.lax.scan(update, init(key), jnp.arange(updates))[0]
