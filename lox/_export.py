"""What `jax.export` has to know to write functions whose results hold logs, and to read them in another process."""

import json
from typing import Any

from jax import export

from lox import logify
from lox._data._histogram import Edges, Histogram
from lox._data._image import Image
from lox._data._logdict import Layout, _Keys, logdict
from lox._data._logger_state import LoggerState


def _layouts_to_bytes(aux: Any) -> bytes:
    keys, layouts = aux
    return json.dumps({"keys": keys, "layouts": {key: layout._asdict() for key, layout in layouts}}).encode()


def _layouts_from_bytes(data: bytes) -> Any:
    found = json.loads(data)
    layouts = {
        key: Layout(**{name: _as_tuples(value) for name, value in layout.items()})
        for key, layout in found["layouts"].items()
    }
    return _Keys(found["keys"]), tuple(layouts.items())


def _as_tuples(x: Any) -> Any:
    return tuple(map(_as_tuples, x)) if isinstance(x, list) else x


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
