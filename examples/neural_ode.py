"""A neural ODE, with logs inside of the solver: `python examples/neural_ode.py`.

Diffrax solves the equation in a `while_loop`: how many steps it takes is known only when it is done. The vector field
logs that it is evaluated, and the solver each step that it tries. While training, `spool(reduce=...)` makes of these
events a count and a mean for each trajectory, in constant memory; afterwards `spool(capacity=...)` returns every step
of one solution. To differentiate, Diffrax computes the steps again. They count once: the numbers are those of its own
statistics.
"""

import argparse

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import lox

UPDATES, BATCH, SHOWN = 300, 32, 50
TIMES = jnp.linspace(0.0, 2.0, 21)


# --- the equation --------------------------------------------------------------------------------


def spiral(t, y, args):
    """The truth: the spiral that neural ODEs were first fitted to."""
    return y**3 @ jnp.array([[-0.1, 2.0], [-2.0, -0.1]])


class Field(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, prng_key):
        self.mlp = eqx.nn.MLP(in_size=2, out_size=2, width_size=64, depth=2, activation=jnp.tanh, key=prng_key)

    def __call__(self, t, y, args):
        lox.log({"solver/evaluations": 1}, t=t)
        return self.mlp(y)


class Solver(diffrax.Tsit5):
    """Tsit5 that logs the steps it tries, also those that turn out to be too large and are tried again."""

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        lox.log({"solver/steps": 1, "solver/step_size": t1 - t0}, t=t0)
        return super().step(terms, t0, t1, y0, args, solver_state, made_jump)


def solve(field, y0):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        Solver(),
        t0=TIMES[0],
        t1=TIMES[-1],
        dt0=0.05,
        y0=y0,
        saveat=diffrax.SaveAt(ts=TIMES),
        stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-4),
    )


# --- the training --------------------------------------------------------------------------------

optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, UPDATES))
solve_all = jax.vmap(solve, in_axes=(None, 0))


def data(prng_key, number):
    """Return random places and the true trajectories from there. Solving for them is not what is to be logged."""
    y0 = jax.random.uniform(prng_key, (number, 2), minval=-1.5, maxval=1.5)
    return y0, lox.nolog(solve_all)(spiral, y0).ys


def loss(field, y0, truth):
    solution = solve_all(field, y0)
    return jnp.mean((solution.ys - truth) ** 2), solution.stats["num_steps"]


def train(prng_key):
    """Fit a field. Also return whether all steps were logged once, by the statistics of Diffrax."""
    init_key, data_key = jax.random.split(prng_key)
    params, static = eqx.partition(Field(init_key), eqx.is_array)  # a scan carries arrays only

    def update(carry, number):
        params, moments = carry
        # There is a number for each trajectory: the `vmap` over them is inside.
        gradient = lox.spool(
            eqx.filter_value_and_grad(loss, has_aux=True),
            reduce={"solver/evaluations": "count", "solver/steps": "count", "solver/step_size": "mean"},
        )
        y0, truth = data(jax.random.fold_in(data_key, number), BATCH)
        ((value, steps), grads), solver = gradient(eqx.combine(params, static), y0, truth)
        means = {key: jnp.mean(solver[key]) for key in solver}
        lox.log({"loss": value, "grad_norm": optax.tree.norm(grads), **means}, step=number)
        changes, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(params, changes), moments), jnp.all(solver["solver/steps"] == steps)

    carry, logged_once = jax.lax.scan(update, (params, optimizer.init(params)), jnp.arange(UPDATES))
    return eqx.combine(carry[0], static), jnp.all(logged_once)


def main(directory="lox-neural-ode"):
    prng_key = jax.random.key(0)

    def show(logs):
        means = [logs[f"solver/{key}"] for key in ("evaluations", "steps", "step_size")]
        print("{:6} {:9.5f} {:13.1f} {:7.1f} {:10.3f}".format(logs.step["loss"], logs["loss"], *means), flush=True)

    print("                    a trajectory takes, on average")
    print("update      loss   evaluations   steps  step size", flush=True)
    with lox.SaveLogger(directory, mode="overwrite") as logger:
        run = logger.init(prng_key, config={"batch": BATCH})
        # Some updates are shown, all are saved.
        shown = lox.tap(train, show, interval=SHOWN)
        field, logged_once = eqx.filter_jit(logger.tap(shown, run, buffer=SHOWN))(prng_key)
    assert logged_once

    solution, logs = lox.spool(solve, capacity=100)(field, jnp.array([1.5, 0.0]))
    sizes = logs["solver/step_size"]
    # One evaluation before the first step, and then six in each: the seventh is that of the step before.
    assert len(sizes) == solution.stats["num_steps"] and len(logs["solver/evaluations"]) == 6 * len(sizes) + 1
    again = len(sizes) - int(solution.stats["num_accepted_steps"])
    print(f"\nthe steps of one solution: {len(sizes)}, of which {again} were too large and were tried again")
    for name, values in ("from t", logs.t["solver/step_size"]), ("size", sizes):
        print(f"{name:>6}", *(f"{x:5.3f}" for x in values))
    print(f"\nthe curves: lox ui {directory}")
    return lox.load(directory, prng_key)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default="lox-neural-ode", help="where the run goes (default: %(default)s)")
    main(**vars(parser.parse_args()))
