"""Bridges to libraries of neural networks: paths of modules as scopes, and what Flax sows."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lox

pytestmark = pytest.mark.slow
X = jnp.arange(6.0).reshape(2, 3) / 10


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is installed with the newest JAX only")


def shapes(logs: Any) -> dict[str, Any]:
    return {key: jnp.shape(value) for key, value in logs.items()}


def same(a: Any, b: Any) -> None:
    assert list(a) == list(b)
    for key in a:
        np.testing.assert_allclose(a[key], b[key], rtol=1e-6)


# --- Linen ---------------------------------------------------------------------------------------


def linen(by_hand: bool = False) -> tuple[Any, Any]:
    """Make a model whose layers log and sow, and its variables; by hand with a `lox.scope` around every layer."""
    nn = library("flax.linen")

    def scope(name: str) -> Any:
        return lox.scope(name) if by_hand else contextlib.nullcontext()

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Dense(3)(x)
            lox.log({"norm": jnp.linalg.norm(x)})
            self.sow("intermediates", "mean", x.mean())
            self.sow("intermediates", "mean", 2 * x.mean())
            return self.tail(x)

        def tail(self, x: Any) -> Any:
            lox.log({"sum": x.sum()})
            self.sow("intermediates", "total", x.sum(), init_fn=lambda: 0.0, reduce_fn=lambda a, b: a + b)
            return x

    class Model(nn.Module):
        def setup(self) -> None:
            self.encoder = Layer()
            self.decoder = nn.remat(Layer)()
            self.jitted = nn.jit(Layer)()
            self.layers = [Layer(), Layer()]
            self.deep = Layer()

        def __call__(self, x: Any) -> Any:
            for name in ("encoder", "decoder", "jitted"):
                with scope(name):
                    x = getattr(self, name)(x)
            for n, layer in enumerate(self.layers):
                with scope(f"layers_{n}"):
                    x = layer(x)
            lifted = {"variable_axes": {"params": 0, "intermediates": 0}, "split_rngs": {"params": True}, "length": 3}
            with scope("deep"):
                x, _ = nn.scan(lambda layer, x, _: (layer(x), None), **lifted)(self.deep, x, None)
            lox.log({"norm": jnp.linalg.norm(x)})
            return x

    model = Model()
    return model, lox.nolog(model.init)(jax.random.key(0), X)


LINEN = ["encoder", "decoder", "jitted", "layers_0", "layers_1", "deep"]


def test_linen_modules_are_scopes() -> None:
    (model, variables), (by_hand, _) = linen(), linen(by_hand=True)
    apply = lox.flax.scope_modules(model.apply)
    expected = lox.spool(by_hand.apply)(variables, X)[1]
    assert list(expected) == [f"{name}/{key}" for name in LINEN for key in ("norm", "sum")] + ["norm"]
    assert expected["deep/norm"].shape == (3,)
    same(lox.spool(apply)(variables, X)[1], expected)
    same(lox.spool(jax.jit(apply))(variables, X)[1], expected)
    same(lox.spool(lambda *args: jax.jit(apply)(*args))(variables, X)[1], expected)
    # Any function that applies a model will do, and the scopes of the user are outside.
    with_others = lox.flax.scope_modules(lambda v, x: lox.scope("train")(model.apply)(v, x).sum())
    logs = lox.spool(jax.grad(with_others))(variables, X)[1]
    same(logs, {f"train/{key}": value for key, value in expected.items()})
    # The model is as it was.
    assert list(lox.spool(model.apply)(variables, X)[1]) == ["norm", "sum"]


def test_linen_under_vmap_has_lanes() -> None:
    model, variables = linen()
    logs = lox.spool(jax.vmap(lox.flax.scope_modules(model.apply), in_axes=(None, 0)))(variables, jnp.stack([X, X + 1]))
    assert logs[1]["encoder/norm"].shape == (2,) and logs[1]["deep/norm"].shape == (3, 2)


def test_a_module_called_by_one_that_does_not_contain_it() -> None:
    nn = library("flax.linen")

    class Embed(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            lox.log({"norm": jnp.linalg.norm(x)})
            return nn.Dense(3)(x)

    class Head(nn.Module):
        embed: Any

        def __call__(self, x: Any) -> Any:
            return self.embed(x)

    class Model(nn.Module):
        def setup(self) -> None:
            self.embed = Embed()
            self.head = Head(self.embed)

        def __call__(self, x: Any) -> Any:
            return self.head(self.embed(x))

    model = Model()
    variables = lox.nolog(model.init)(jax.random.key(0), X)
    logs = lox.spool(lox.flax.scope_modules(model.apply))(variables, X)[1]
    assert list(logs) == ["embed/norm", "head/embed/norm"]


def test_what_linen_modules_sow_is_logged() -> None:
    model, variables = linen()
    out, state = lox.nolog(model.apply)(variables, X, mutable=["intermediates"])
    sown = state["intermediates"]
    logged = lox.flax.log_sown(model.apply, step=7, tags="sown", prefix="train/")
    for f in (logged, jax.jit(logged), lambda *args: jax.jit(logged)(*args)):
        result, logs = lox.spool(f, tags="sown")(variables, X)
        np.testing.assert_allclose(result, out, rtol=1e-6)
        for name in LINEN:
            np.testing.assert_allclose(logs[f"train/{name}/mean"], jnp.stack(sown[name]["mean"]), rtol=1e-6)
            np.testing.assert_allclose(logs[f"train/{name}/total"], sown[name]["total"], rtol=1e-6)
            assert logs.step[f"train/{name}/mean"].tolist() == [7, 7]
            assert int(logs.step[f"train/{name}/total"]) == 7
        assert len(logs) == 2 * len(LINEN) and logs["train/deep/mean"].shape == (2, 3)


def test_what_was_sown_is_returned_only_if_asked_for() -> None:
    model, variables = linen()
    logged = lox.nolog(lox.flax.log_sown(model.apply))
    assert isinstance(logged(variables, X), jax.Array)
    assert list(logged(variables, X, mutable=["batch_stats"])[1]) == []
    assert list(logged(variables, X, mutable="intermediates")[1]) == ["intermediates"]
    assert "intermediates" in logged(variables, X, mutable=True)[1]
    # What Flax captures by itself is sown too.
    logs = lox.spool(lox.flax.log_sown(model.apply), "*__call__")(variables, X, capture_intermediates=True)[1]
    assert logs["encoder/Dense_0/__call__"].shape == (2, 3)


@pytest.mark.parametrize("order", ["scope_modules(log_sown)", "log_sown(scope_modules)"])
def test_sown_and_logged_have_the_same_paths(order: str) -> None:
    model, variables = linen()
    first, second = lox.flax.log_sown, lox.flax.scope_modules
    if order.startswith("log_sown"):
        first, second = second, first
    logs = lox.spool(second(first(model.apply)))(variables, X)[1]
    assert {key for key in logs if key.startswith("encoder/")} == {
        f"encoder/{k}" for k in ("norm", "sum", "mean", "total")
    }
    assert "norm" in logs and "mean" not in logs


def test_what_is_around_a_scoped_function_is_not_lost() -> None:
    """Decorators copy the attributes of a function, and so what `scope_modules` has noted."""
    model, variables = linen()
    scoped = lox.flax.scope_modules(model.apply)
    for around in (lox.spool(scoped), jax.jit(scoped)):
        with pytest.raises(lox.LogTypeError, match="does not know where the model is"):
            lox.flax.log_sown(around)(variables, X)


# --- NNX -----------------------------------------------------------------------------------------


def nnx_model() -> Any:
    nnx = library("flax.nnx")

    class Layer(nnx.Module):
        def __init__(self, rngs: Any):
            self.linear = nnx.Linear(3, 3, rngs=rngs)
            self.normed = nnx.BatchNorm(3, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = self.normed(self.linear(x))
            lox.log({"norm": jnp.linalg.norm(x)})
            self.sow(nnx.Intermediate, "mean", jnp.abs(x).mean(), capture_noop=True)
            return self.tail(x)

        def tail(self, x: Any) -> Any:
            lox.log({"sum": x.sum()})
            return x

    class Model(nnx.Module):
        def __init__(self, rngs: Any):
            self.encoder = Layer(rngs)
            self.layers = nnx.List([Layer(rngs), Layer(rngs)])

        def __call__(self, x: Any) -> Any:
            x = self.encoder(x)
            for layer in self.layers:
                x = nnx.remat(lambda layer, x: layer(x))(layer, x)
            return x

        def encode(self, x: Any) -> Any:
            return self.encoder(x)

    return Model(nnx.Rngs(0))


NNX = [f"{path}/{key}" for path in ("encoder", "layers/0", "layers/1") for key in ("norm", "sum")]


def test_nnx_modules_are_scopes() -> None:
    nnx = library("flax.nnx")
    scoped = lox.flax.scope_modules
    call = lambda model, x: model(x).sum()  # noqa: E731
    values = lox.spool(nnx_model())(X)[1]
    for f in (
        scoped(call),
        nnx.jit(scoped(call)),
        scoped(nnx.jit(call)),
        nnx.grad(scoped(call)),
        scoped(nnx.grad(call)),
        nnx.jit(nnx.grad(scoped(call))),
        lambda model, x: scoped(model)(x),
        lambda model, x: scoped(model.__call__)(x),
    ):
        model = nnx_model()
        types = [type(module) for _, module in nnx.iter_modules(model)]
        logs = lox.spool(f)(model, X)[1]
        assert list(logs) == NNX
        np.testing.assert_allclose([logs[key] for key in NNX[::2]], values["norm"], rtol=1e-6)
        # Its state has changed, and nothing else.
        assert float(jnp.abs(model.encoder.normed.mean[...]).sum()) > 0
        assert [type(module) for _, module in nnx.iter_modules(model)] == types
    assert list(lox.spool(scoped(model.encode))(X)[1]) == NNX[:2]


def test_nnx_modules_have_their_classes_again_after_an_error() -> None:
    model = nnx_model()
    before = type(model), type(model.encoder)

    def fail(model: Any) -> None:
        assert type(model) is not before[0] and isinstance(model, before[0])
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        lox.flax.scope_modules(fail)(model)
    assert (type(model), type(model.encoder)) == before


def test_a_jitted_function_of_nnx_is_compiled_once_with_scopes_and_once_without() -> None:
    nnx = library("flax.nnx")
    traced = []

    @nnx.jit
    def call(model: Any, x: Any) -> Any:
        traced.append(type(model).__name__)
        return model(x)

    model = nnx_model()
    keys = [list(lox.spool(f)(model, X)[1]) for f in (call, lox.flax.scope_modules(call)) * 3]
    assert keys == [["norm", "sum"], NNX] * 3
    assert len(traced) == 2


def test_what_nnx_modules_sow_is_logged() -> None:
    nnx = library("flax.nnx")
    model = nnx_model()
    out, sown = lox.nolog(nnx.capture(nnx_model(), nnx.Intermediate))(X)
    for f in (lox.flax.log_sown(model, step=3), lambda x: lox.flax.log_sown(lambda m, x: m(x), step=3)(model, x)):
        result, logs = lox.spool(f, "*mean")(X)
        np.testing.assert_allclose(result, out, rtol=1e-6)
        assert list(logs) == ["encoder/mean", "layers/0/mean", "layers/1/mean"]
        np.testing.assert_allclose(logs["layers/1/mean"], sown["layers"][1]["mean"].get_value()[0], rtol=1e-6)
        assert int(logs.step["encoder/mean"]) == 3
    for f in (lox.flax.scope_modules(lox.flax.log_sown(model)), lox.flax.log_sown(lox.flax.scope_modules(model))):
        assert list(lox.spool(f)(X)[1]) == [*NNX, "encoder/mean", "layers/0/mean", "layers/1/mean"]


# --- Flax: what cannot be done -------------------------------------------------------------------


def test_errors_say_how_to_call() -> None:
    model, variables = linen()
    unknown = (
        "`lox.flax.{0}` does not know where the model is.\n"
        "With Linen, give it the model's apply:  lox.flax.{0}(model.apply)\n"
        "with NNX the model:                     lox.flax.{0}(model)\n"
        "or a function of it:                    lox.flax.{0}(lambda model, x: model(x))(model, x)"
    )
    for user, f in (
        ("log_sown", lox.flax.log_sown(lambda x: x)),
        ("scope_modules", lox.flax.scope_modules(lambda x: x)),
    ):
        with pytest.raises(lox.LogTypeError) as error:
            f(X)
        assert str(error.value) == unknown.format(user)
    for f, message in (
        (
            lambda: lox.flax.scope_modules(jax.jit(model.apply)),
            "`lox.flax.scope_modules` got a jitted function, which JAX may not run again: "
            "write `jax.jit(lox.flax.scope_modules(f))`.",
        ),
        (
            lambda: lox.flax.scope_modules(model),
            "`lox.flax.scope_modules` got a module of Linen: give it `model.apply`.",
        ),
        (
            lambda: lox.flax.log_sown(model.apply, 3),
            "`collection` is 3; in Linen it is a name, such as 'intermediates'.",
        ),
        (
            lambda: lox.flax.log_sown(nnx_model(), "intermediates"),
            "`collection` is 'intermediates'; in NNX it is a type, such as `nnx.Intermediate`.",
        ),
    ):
        with pytest.raises(lox.LogTypeError) as error:
            f()
        assert str(error.value) == message
    with pytest.warns(lox.LoxWarning) as warned:
        lox.nolog(lox.flax.log_sown(model.apply, "losses"))(variables, X)
    assert [str(w.message) for w in warned] == [
        "`lox.flax.log_sown` has found nothing that was sown into 'losses': no event is logged."
    ]


# --- Equinox -------------------------------------------------------------------------------------


def equinox_model() -> Any:
    eqx = library("equinox")

    class Layer(eqx.Module):
        linear: Any
        label: Any = eqx.field(static=True, default=((1, "a"), None))

        def __call__(self, x: Any) -> Any:
            x = self.linear(x)
            lox.log({"norm": jnp.linalg.norm(x)})
            return self.tail(x)

        def tail(self, x: Any) -> Any:
            lox.log({"sum": x.sum()})
            return x

    class Model(eqx.Module):
        layers: list[Any]
        heads: dict[str, Any]
        jitted: Any
        activation: Any

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = self.activation(layer(x))
            return self.heads["policy"](x) + self.jitted(x)

        @eqx.filter_jit
        def encode(self, x: Any) -> Any:
            return self.layers[0](x)

    layers = [Layer(eqx.nn.Linear(3, 3, key=jax.random.key(n))) for n in range(4)]
    return Model(layers[:2], {"policy": layers[2]}, eqx.filter_jit(layers[3]), jax.nn.tanh)


EQUINOX = [f"{path}/{key}" for path in ("layers/0", "layers/1", "heads/policy", "jitted") for key in ("norm", "sum")]


def test_equinox_modules_are_scopes() -> None:
    eqx = library("equinox")
    model, x = equinox_model(), X[0]
    scoped = lox.equinox.scope_modules(model)
    out, plain = lox.spool(model)(x)
    loss = lambda model, x: lox.equinox.scope_modules(model)(x).sum()  # noqa: E731
    for f in (
        lambda: scoped(x),
        lambda: jax.jit(lambda x: scoped(x))(x),
        lambda: eqx.filter_jit(scoped)(x),
        lambda: eqx.filter_jit(lambda model, x: model(x))(scoped, x),
        lambda: eqx.filter_grad(loss)(model, x),
        lambda: eqx.filter_jit(eqx.filter_grad(loss))(model, x),
    ):
        logs = lox.spool(f)()[1]
        assert list(logs) == EQUINOX
        np.testing.assert_allclose([logs[key] for key in EQUINOX[::2]], plain["norm"], rtol=1e-6)
    np.testing.assert_allclose(lox.nolog(scoped)(x), out, rtol=1e-6)
    assert shapes(lox.spool(jax.vmap(scoped))(X)[1]) == dict.fromkeys(EQUINOX, (2,))
    assert list(lox.spool(scoped.encode)(x)[1]) == EQUINOX[:2]
    assert list(lox.spool(lox.equinox.scope_modules(model.layers[0].tail))(x)[1]) == ["sum"]
    assert list(lox.spool(lox.equinox.scope_modules([model, model])[1])(x)[1]) == [f"1/{key}" for key in EQUINOX]


def test_a_scoped_equinox_model_is_the_same_to_everything_else() -> None:
    eqx = library("equinox")
    model = equinox_model()
    scoped = lox.equinox.scope_modules(model)
    assert isinstance(scoped, type(model)) and isinstance(scoped.layers[0].linear, eqx.nn.Linear)
    assert repr(scoped) == repr(model)
    assert all(a is b for a, b in zip(jax.tree.leaves(scoped), jax.tree.leaves(model), strict=True))
    # Twice is the same as once, and a part of a model can be a model.
    again = lox.equinox.scope_modules(scoped)
    assert jax.tree.structure(again) == jax.tree.structure(scoped)
    assert list(lox.spool(lox.equinox.scope_modules(scoped.layers[1]))(X[0])[1]) == ["norm", "sum"]
    # Gradients fit the model if the scopes are made inside.
    grads = lox.nolog(eqx.filter_grad(lambda model: lox.equinox.scope_modules(model)(X[0]).sum()))(model)
    assert jax.tree.structure(grads) == jax.tree.structure(eqx.filter(model, eqx.is_inexact_array))


def test_equinox_layers_with_state() -> None:
    eqx = library("equinox")
    layers = [eqx.nn.Linear(3, 3, key=jax.random.key(0)), eqx.nn.BatchNorm(3, "batch", mode="batch")]
    model = eqx.nn.Sequential(layers)
    mapped = {"axis_name": "batch", "in_axes": (0, None), "out_axes": (0, None)}
    expected, _ = jax.vmap(model, **mapped)(X, eqx.nn.State(model))
    found, _ = jax.vmap(lox.equinox.scope_modules(model), **mapped)(X, eqx.nn.State(model))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_equinox_without_a_module() -> None:
    library("equinox")
    with pytest.raises(lox.LogTypeError) as error:
        lox.equinox.scope_modules({"w": X})
    assert str(error.value) == "`lox.equinox.scope_modules` got dict, in which there is no `equinox.Module`."
