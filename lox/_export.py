"""What `jax.export` has to know to write functions whose results hold logs, and to read them in another process."""

import json
from typing import Any

from jax import export

from lox import logify
from lox._data._histogram import Edges, Histogram
from lox._data._image import Image
from lox._data._logdict import Layout, Structure, logdict
from lox._data._logger_state import LoggerState


def _structure_to_bytes(structure: Structure) -> bytes:
    return json.dumps({key: layout._asdict() for key, layout in structure.layouts.items()}).encode()


def _structure_from_bytes(data: bytes) -> Structure:
    layouts = json.loads(data).items()
    return Structure({k: Layout(**{name: _as_tuples(x) for name, x in layout.items()}) for k, layout in layouts})


def _as_tuples(x: Any) -> Any:
    return tuple(map(_as_tuples, x)) if isinstance(x, list) else x


def install() -> None:
    """Register what users can have in their results."""
    register = export.register_pytree_node_serialization
    nothing: dict[str, Any] = dict(serialize_auxdata=lambda aux: b"", deserialize_auxdata=lambda data: None)
    register(
        logdict,
        serialized_name="lox.logdict",
        serialize_auxdata=_structure_to_bytes,
        deserialize_auxdata=_structure_from_bytes,
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
