"""What `jax.export` has to know to write functions whose results hold logs, and to read them in another process."""

import json
from typing import Any

from jax import export

from lox import logify
from lox._histogram import Edges, Histogram
from lox._image import Image
from lox._logdict import Layout, _Keys, logdict
from lox.loggers._run import LoggerState


def _layouts_to_bytes(aux: Any) -> bytes:
    keys, layouts = aux
    return json.dumps({"keys": list(keys), "layouts": dict(layouts)}).encode()


def _layouts_from_bytes(data: bytes) -> Any:
    found = json.loads(data)
    layouts = {
        key: Layout(
            bool(events),
            tuple(map(_flags, flags)),
            tuple(ndims),
            tuple((name, _flags(of)) for name, of in step_flags),
            _flags(valid_flags),
        )
        for key, (events, flags, ndims, step_flags, valid_flags) in found["layouts"].items()
    }
    return _Keys(found["keys"]), tuple(layouts.items())


def _flags(found: list[Any]) -> tuple[Any, ...]:
    """A flag is a boolean, or the names of mesh axes."""
    return tuple(tuple(flag) if isinstance(flag, list) else flag for flag in found)


def install() -> None:
    """Register what users can have in their results."""
    register = export.register_pytree_node_serialization
    nothing: dict[str, Any] = dict(serialize_auxdata=lambda aux: b"", deserialize_auxdata=lambda data: None)
    register(
        logdict,
        serialized_name="lox.logdict",
        serialize_auxdata=_layouts_to_bytes,
        deserialize_auxdata=_layouts_from_bytes,
    )
    register(
        Histogram,
        serialized_name="lox.Histogram",
        serialize_auxdata=lambda edges: json.dumps(edges.values.tolist()).encode(),
        deserialize_auxdata=lambda data: Edges(json.loads(data)),
    )
    register(Image, serialized_name="lox.Image", **nothing)
    register(logify.Logs, serialized_name="lox.logify.Logs", **nothing)
    export.register_namedtuple_serialization(LoggerState, serialized_name="lox.loggers.LoggerState")
