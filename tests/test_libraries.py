"""Logs inside other people's libraries."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import lox
import lox.testing

pytestmark = pytest.mark.slow


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is installed with the newest JAX only")


# --- Flax ----------------------------------------------------------------------------------------


def scanned(**options: Any) -> tuple[Any, Any, Any]:
    """Make a module that scans a cell over three inputs, and its arguments."""
    nn = library("flax.linen")

    class Cell(nn.Module):
        @nn.compact
        def __call__(self, carry: Any, x: Any) -> Any:
            k = self.param("k", nn.initializers.ones, (2,))
            lox.log({"carry": carry.sum(), "k": k.sum(), "constant": 1.0})
            jax.jit(lambda k: lox.log({"inner": k.sum()}))(k)
            return carry * k + x, None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, carry: Any, xs: Any) -> Any:
            return nn.scan(Cell, split_rngs={"params": False}, **options)()(carry, xs)[0]

    model, args = Model(), (jnp.zeros(2), jnp.ones((3, 2)))
    return model, lox.nolog(model.init)(jax.random.key(0), *args), args


@pytest.mark.parametrize("options", [{"variable_broadcast": "params"}, {"variable_axes": {"params": 0}, "length": 3}])
def test_flax_scan_logs_once_per_iteration(options: dict[str, Any]) -> None:
    model, variables, args = scanned(**options)
    f = lambda v, *args: model.apply(v, *args).sum()  # noqa: E731
    for g in (f, jax.jit(f), jax.grad(f), jax.jit(jax.grad(f))):
        logs = lox.spool(g)(variables, *args)[1]
        assert {key: value.shape for key, value in logs.items()} == dict.fromkeys(
            ["carry", "k", "constant", "inner"], (3,)
        )
        assert logs["carry"].tolist() == [0.0, 2.0, 4.0]
    with lox.testing.capture() as events:
        jax.block_until_ready(f(variables, *args))
    assert len(events) == 6


def test_flax_modules_with_state() -> None:
    nnx = library("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs: Any):
            self.linear = nnx.Linear(2, 2, rngs=rngs)
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x: Any) -> Any:
            self.calls[...] += 1
            y = self.linear(x)
            lox.log({"y": y.sum()}, call=self.calls[...])
            return y

    model = Model(nnx.Rngs(0))

    @nnx.jit
    def loss(model: Any, x: Any) -> Any:
        return nnx.value_and_grad(lambda model: (model(x) ** 2).sum())(model)[0]

    for n in (1, 2):
        _, logs = lox.spool(loss)(model, jnp.ones(2))
        assert logs["y"].shape == () and int(logs.call["y"]) == n
    assert int(model.calls[...]) == 2
    assert lox.nolog(loss)(model, jnp.ones(2)).shape == ()


# --- Equinox -------------------------------------------------------------------------------------


def test_callables_without_a_name(tmp_path: Any) -> None:
    """What some of Equinox's wrappers have as `__name__` is not a string."""
    eqx = library("equinox")

    class Double(eqx.Module):
        def __call__(self, x: Any) -> Any:
            lox.log({"x": x})
            lox.logify.log("y", x)
            return 2 * x

    f = eqx.filter_jit(eqx.filter_vmap(Double()))
    assert not isinstance(f.__name__, str)
    xs = jnp.arange(3.0)
    for g in (lox.spool(f), lox.logify.logify(f)):
        assert g(xs)[0].tolist() == [0.0, 2.0, 4.0]
    received: list[Any] = []
    with lox.SaveLogger(tmp_path) as logger:
        state = logger.init(jax.random.key(0))
        for g in (
            lox.tap(f, received.append),
            lox.nolog(f),
            lox.keep(f, "x"),
            lox.watch(f),
            logger.tap(f, state),
            logger.spool(f, state),
        ):
            assert g(xs).tolist() == [0.0, 2.0, 4.0]
    assert received and lox.load(tmp_path, "0")["x"].shape == (2, 3)


KINDS = ["lax", "checkpointed", "bounded"]
STARTS = jnp.array([4.0, 32.0, 1.0])
HALVED = [[4.0, 2.0], [32.0, 16.0, 8.0, 4.0, 2.0], []]


def halving(kind: str) -> Any:
    """Halve a number until it is at most one, in an Equinox loop."""
    eqxi = library("equinox.internal")

    def body(x: Any) -> Any:
        lox.log({"x": x})
        return x / 2

    options = {"base": 2} if kind == "bounded" else {}
    return lambda x: eqxi.while_loop(lambda x: x > 1, body, x, max_steps=8, kind=kind, **options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "spooled",
    [
        lambda f: lox.spool(jax.vmap(f), capacity=8),
        lambda f: lox.spool(jax.jit(jax.vmap(f)), capacity=8),
        lambda f: jax.jit(lox.spool(jax.vmap(f), capacity=8)),
        lambda f: jax.vmap(lox.spool(f, capacity=8)),
        lambda f: jax.jit(jax.vmap(lox.spool(f, capacity=8))),
    ],
    ids=["spool(vmap)", "spool(jit(vmap))", "jit(spool(vmap))", "vmap(spool)", "jit(vmap(spool))"],
)
def test_lanes_of_an_equinox_loop_that_have_finished_do_not_log(kind: str, spooled: Any) -> None:
    f = halving(kind)
    out, logs = spooled(f)(STARTS)
    assert [logs.lane(i)["x"].tolist() for i in range(3)] == HALVED
    assert out.tolist() == [1.0, 1.0, 1.0]
    assert lox.spool(f, capacity=8)(4.0)[1]["x"].tolist() == [4.0, 2.0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_lanes_of_an_equinox_loop_under_two_vmaps(kind: str) -> None:
    f = halving(kind)
    twice = jnp.stack([STARTS, STARTS[::-1]])
    for g in (
        lox.spool(jax.vmap(jax.vmap(f)), capacity=8),
        jax.vmap(lox.spool(jax.vmap(f), capacity=8)),
        jax.vmap(jax.vmap(lox.spool(f, capacity=8))),
    ):
        logs = g(twice)[1]
        assert [logs.lane(0).lane(i)["x"].tolist() for i in range(3)] == HALVED
        assert [logs.lane(1).lane(i)["x"].tolist() for i in range(3)] == HALVED[::-1]
    # One of them has lanes that do not differ.
    logs = lox.spool(jax.vmap(lambda x: jax.vmap(lambda y: f(x) + y)(jnp.ones(2))), capacity=8)(STARTS)[1]
    assert logs["x"].shape == (5, 3)
    assert [logs.lane(i)["x"].tolist() for i in range(3)] == HALVED


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_lanes_of_an_equinox_loop_are_reduced_and_streamed(kind: str) -> None:
    f = halving(kind)
    for g in (lambda how: lox.spool(jax.vmap(f), reduce=how), lambda how: jax.vmap(lox.spool(f, reduce=how))):
        assert g("count")(STARTS)[1]["x"].tolist() == [2, 5, 0]
        logs = g("sum")(STARTS)[1]
        assert logs["x"][:2].tolist() == [6.0, 62.0] and logs.valid["x"].tolist() == [True, True, False]

    received: list[Any] = []
    for g in (lox.tap(jax.vmap(f), received.append), jax.vmap(lox.tap(f, received.append))):
        jax.block_until_ready(g(STARTS))
        jax.effects_barrier()
        lanes = [[float(logs["x"][i]) for logs in received if logs.valid["x"][i]] for i in range(3)]
        assert lanes == HALVED
        received.clear()
    for g in (lox.tap(jax.vmap(f), received.append, buffer=3), jax.vmap(lox.tap(f, received.append, buffer=3))):
        jax.block_until_ready(g(STARTS))
        jax.effects_barrier()
        assert [[x for logs in received for x in logs.lane(i)["x"].tolist()] for i in range(3)] == HALVED
        received.clear()
    with lox.testing.capture() as events:
        jax.block_until_ready(jax.jit(jax.vmap(f))(STARTS))
    assert [logs.valid["x"].sum() for logs in events] == [2, 2, 1, 1, 1]


def test_a_tap_inside_an_equinox_loop() -> None:
    eqxi = library("equinox.internal")
    received: list[Any] = []

    def body(x: Any) -> Any:
        return lox.tap(lambda x: (lox.log({"x": x}), x / 2)[1], received.append)(x)

    for kind in KINDS:
        options = {"base": 2} if kind == "bounded" else {}
        f = lambda x: eqxi.while_loop(lambda x: x > 1, body, x, max_steps=8, kind=kind, **options)  # noqa: B023, E731
        jax.block_until_ready(jax.vmap(f)(STARTS))
        jax.effects_barrier()
        assert [[float(logs["x"][i]) for logs in received if logs.valid["x"][i]] for i in range(3)] == HALVED
        received.clear()


def test_asking_for_any_lane_does_not_finish_lanes() -> None:
    eqxi = library("equinox.internal")

    def f(x: Any) -> Any:  # all lanes go on until the last has finished
        return jax.lax.while_loop(lambda x: eqxi.unvmap_any(x > 1), lambda x: (lox.log({"x": x}), x / 2)[1], x)

    logs = lox.spool(jax.vmap(f), capacity=8)(STARTS)[1]
    assert logs.lane(0)["x"].tolist() == [4.0, 2.0, 1.0, 0.5, 0.25]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
def test_differentiating_an_equinox_loop_repeats_no_event(kind: str) -> None:
    f = halving(kind)
    for grad in (jax.grad(f), jax.jit(jax.grad(f))):
        out, logs = lox.spool(grad, capacity=8)(32.0)
        assert float(out) == 1 / 32
        assert logs["x"].tolist() == HALVED[1]
        with lox.testing.capture() as events:
            jax.block_until_ready(grad(32.0))
        assert [float(e["x"]) for e in events] == HALVED[1]
    logs = lox.spool(jax.vmap(jax.grad(f)), capacity=8)(STARTS)[1]
    assert [logs.lane(i)["x"].tolist() for i in range(3)] == HALVED
    logs = lox.spool(jax.grad(lambda x: jax.vmap(f)(x).sum()), capacity=8)(STARTS)[1]
    assert [logs.lane(i)["x"].tolist() for i in range(3)] == HALVED
    logs = jax.grad(lox.spool(f, capacity=8), has_aux=True)(32.0)[1]
    assert logs.compact()["x"].tolist() == HALVED[1]


def test_equinox_filtered_transformations() -> None:
    eqx = library("equinox")
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))

    @eqx.filter_custom_vjp
    def scaled(x: Any) -> Any:
        lox.log({"primal": x.sum()})
        return 2 * x

    @scaled.def_fwd
    def _(perturbed: Any, x: Any) -> Any:
        lox.log({"forward": x.sum()})
        return 2 * x, None

    @scaled.def_bwd
    def _(residuals: Any, cotangent: Any, perturbed: Any, x: Any) -> Any:
        lox.log({"backward": cotangent.sum()})
        return 2 * cotangent

    def loss(model: Any, x: Any) -> Any:
        y = eqx.filter_checkpoint(model)(x)
        lox.log({"y": y.sum()})
        return scaled(y).sum()

    x = jnp.ones(2)
    for f in (loss, eqx.filter_jit(loss)):
        assert {k: v.shape for k, v in lox.spool(f)(model, x)[1].items()} == {"y": (), "primal": ()}
        for grad in (eqx.filter_grad(f), eqx.filter_jit(eqx.filter_grad(f)), eqx.filter_value_and_grad(f)):
            logs = lox.spool(grad)(model, x)[1]
            assert {k: v.shape for k, v in logs.items()} == {"y": (), "forward": (), "backward": ()}
            assert float(logs["backward"]) == 2.0
        lanes = eqx.filter_vmap(eqx.filter_grad(f), in_axes=(None, 0))
        logs = lox.spool(lanes)(model, jnp.ones((3, 2)))[1]
        assert {k: v.shape for k, v in logs.items()} == {"y": (3,), "forward": (3,), "backward": ()}


# --- Diffrax and Optimistix ----------------------------------------------------------------------


def decay(adjoint: str | None = None) -> Any:
    """Solve an equation by Heun's method, with two evaluations of the vector field in every step."""
    dfx = library("diffrax")

    def field(t: Any, y: Any, rate: Any) -> Any:
        lox.log({"y": y}, t=t)
        return -rate * y

    options = {} if adjoint is None else {"adjoint": getattr(dfx, adjoint)()}

    def solve(y: Any) -> Any:
        sizes = dfx.PIDController(rtol=1e-2, atol=1e-2)
        times = {"t0": 0.0, "t1": 2.0, "dt0": 0.5, "stepsize_controller": sizes, "max_steps": 64}
        sol = dfx.diffeqsolve(dfx.ODETerm(field), dfx.Heun(), y0=y, args=1.5, **times, **options)
        return sol.ys[-1], sol.stats["num_steps"]

    return solve


YS = jnp.array([1.0, 20.0, 0.01])


@pytest.mark.sample(1)
@pytest.mark.parametrize("adjoint", [None, "DirectAdjoint", "ForwardMode"])
def test_diffrax_events_are_those_of_the_steps(adjoint: str | None) -> None:
    solve = decay(adjoint)
    (_, steps), logs = lox.spool(jax.jit(solve), capacity=256)(1.0)
    count = len(logs["y"])
    assert count == 2 * int(steps)
    for g in (lox.spool(jax.vmap(solve), capacity=256), jax.vmap(lox.spool(solve, capacity=256))):
        (_, steps), lanes = g(YS)
        assert len(set(steps.tolist())) > 1
        assert [len(lanes.lane(i)["y"]) for i in range(3)] == (2 * steps).tolist()
    if adjoint == "ForwardMode":
        grad = lambda y: jax.jvp(lambda y: solve(y)[0], (y,), (jnp.ones_like(y),))[1]  # noqa: E731
    else:
        grad = jax.grad(lambda y: solve(y)[0])
    again = lox.spool(jax.jit(grad), capacity=256)(1.0)[1]
    assert again["y"].tolist() == logs["y"].tolist() and again.t["y"].tolist() == logs.t["y"].tolist()
    lanes = lox.spool(jax.jit(jax.vmap(grad)), capacity=256)(YS)[1]
    assert [len(lanes.lane(i)["y"]) for i in range(3)] == (2 * steps).tolist()


@pytest.mark.nightly
def test_diffrax_backsolve_evaluates_the_field_in_a_solve_of_its_own() -> None:
    solve = decay("BacksolveAdjoint")
    (_, steps), logs = lox.spool(jax.jit(solve), capacity=128)(1.0)
    assert len(logs["y"]) == 2 * int(steps)
    again = lox.spool(jax.jit(jax.grad(lambda y: solve(y)[0])), capacity=128)(1.0)[1]
    assert again["y"][: len(logs["y"])].tolist() == logs["y"].tolist()
    later = again.t["y"][len(logs["y"]) :]
    assert later[0] == 2.0 and later[-1] == 0.0  # backwards in time


def root(adjoint: str) -> Any:
    optx = library("optimistix")

    def residual(y: Any, a: Any) -> Any:
        lox.log({"y": y})
        return y**2 - a

    def find(a: Any) -> Any:
        newton = optx.Newton(rtol=1e-5, atol=1e-5)
        sol = optx.root_find(residual, newton, jnp.float32(1), a, max_steps=16, adjoint=getattr(optx, adjoint)())
        return sol.value, sol.stats["num_steps"]

    return find


@pytest.mark.sample(1)
@pytest.mark.parametrize("adjoint", ["RecursiveCheckpointAdjoint", "ImplicitAdjoint"])
def test_optimistix_events_are_those_of_the_steps(adjoint: str) -> None:
    find = root(adjoint)
    xs = jnp.array([2.0, 3.0, 1.0])
    (_, steps), logs = lox.spool(jax.jit(jax.vmap(find)), capacity=32)(xs)
    expected = [logs.lane(i)["y"].tolist() for i in range(3)]
    assert len(set(steps.tolist())) > 1 and list(map(len, expected)) == steps.tolist()
    logs = jax.jit(jax.vmap(lox.spool(find, capacity=32)))(xs)[1]
    assert [logs.lane(i)["y"].tolist() for i in range(3)] == expected
    values, logs = lox.spool(jax.jit(jax.vmap(jax.value_and_grad(find, has_aux=True))), capacity=32)(xs)
    got = [logs.lane(i)["y"].tolist() for i in range(3)]
    assert [lane[: len(e)] for lane, e in zip(got, expected, strict=True)] == expected
    # The rule for implicit functions is evaluated at the root, where the solver has not been before.
    later = [lane[len(e) :] for lane, e in zip(got, expected, strict=True)]
    if adjoint == "ImplicitAdjoint":
        assert [set(lane) for lane in later] == [{float(y)} for y in values[0][0]]
    else:
        assert later == [[], [], []]


# --- OTT and Optax -------------------------------------------------------------------------------


@pytest.mark.nightly
def test_ott_fixed_point_loop() -> None:
    loop = library("ott.math.fixed_point_loop")

    def body(iteration: Any, factor: Any, state: Any, compute_error: Any) -> Any:
        lox.log({"state": state}, iteration=iteration)
        return state * factor

    def solve(factor: Any) -> Any:
        start = jnp.float32(30)
        return loop.fixpoint_iter_backprop(lambda i, c, state: state > 0.01, body, 0, 80, 10, factor, start)

    for g in (solve, jax.grad(solve), jax.jit(jax.grad(solve))):
        logs = lox.spool(g, capacity=200)(jnp.float32(0.9))[1]
        assert logs.iteration["state"].tolist() == list(range(80))
    for g in (jax.vmap(solve), jax.vmap(jax.grad(solve))):
        logs = lox.spool(g, capacity=200)(jnp.array([0.9, 0.5]))[1]
        assert [len(logs.lane(i)["state"]) for i in range(2)] == [80, 20]


@jax.numpy_dtype_promotion("standard")  # which Optax needs
def test_optax_training_loop() -> None:
    optax = library("optax")
    optimizer = optax.adam(0.1)

    def loss(w: Any) -> Any:
        lox.log({"loss": (w - 3) ** 2})
        return (w - 3) ** 2

    @jax.jit
    def train(w: Any) -> Any:
        def step(carry: Any, i: Any) -> Any:
            w, state = carry
            updates, state = optimizer.update(jax.grad(loss)(w), state)
            lox.log({"update": updates}, step=i)
            return (optax.apply_updates(w, updates), state), None

        return jax.lax.scan(step, (w, optimizer.init(w)), jnp.arange(4))[0][0]

    logs = lox.spool(train)(jnp.float32(0))[1]
    assert {k: v.shape for k, v in logs.items()} == {"loss": (4,), "update": (4,)}
    assert logs.step["update"].tolist() == [0, 1, 2, 3]
    logs = lox.spool(jax.vmap(train))(jnp.arange(3.0))[1]
    assert {k: v.shape for k, v in logs.items()} == {"loss": (4, 3), "update": (4, 3)}

    def search(w: Any) -> Any:  # a line search is a while loop in the update
        solver = optax.lbfgs()
        value, grad = jax.value_and_grad(loss)(w)
        updates, _ = solver.update(grad, solver.init(w), w, value=value, grad=grad, value_fn=loss)
        return w + updates

    with lox.testing.capture() as events:
        jax.block_until_ready(search(jnp.float32(0)))
    assert lox.spool(jax.jit(search), capacity=256)(jnp.float32(0))[1]["loss"].shape == (len(events),)
    lanes = lox.spool(jax.vmap(search), capacity=256)(jnp.arange(2.0))[1]
    assert len(lanes.lane(0)["loss"]) == len(events)
