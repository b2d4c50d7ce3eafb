"""What lox raises.

* LoxError
  * SpoolError       a log that `spool` cannot return
  * TransformError   a log inside a primitive that lox cannot look into
  * MismatchError    one key logged with different shapes, structures or reductions (also a ValueError)
  * LogTypeError     something that cannot be logged (also a TypeError)
  * OptionError      an option that does not exist or makes no sense (also a ValueError)
  * StepError        a step that was never logged (also an AttributeError)
  * KeyNotFoundError a key that was never logged (also a KeyError)
  * NonFiniteError   a logged value that is NaN or infinite, found by `watch` (also a FloatingPointError)
  * StoreError       a file that cannot be written or read (also an OSError)
    * RunNotFoundError   no such run, or no runs at all (also a FileNotFoundError)
    * RunExistsError     a run that shall not be there, but is (also a FileExistsError)

LoxWarning, a UserWarning, reports what is not wrong but should be known: events dropped for want of capacity, or a
selection that matches nothing.

Messages say which key, where it was logged, why it cannot be and what to do instead.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


class LoxError(Exception):
    """Base class of everything lox raises on purpose."""


class SpoolError(LoxError):
    """A log that `spool` cannot return."""


class TransformError(LoxError):
    """A log inside a primitive that lox cannot look into."""


class MismatchError(LoxError, ValueError):
    """One key was logged in ways that do not fit together."""


class LogTypeError(LoxError, TypeError):
    """Something that cannot be logged."""


class OptionError(LoxError, ValueError):
    """An option that does not exist or makes no sense."""


class StepError(LoxError, AttributeError):
    """A step that was never logged."""


class KeyNotFoundError(LoxError, KeyError):
    """A key that was never logged."""

    def __str__(self) -> str:
        # Not that of KeyError, which shows the message in quotes.
        return str(self.args[0]) if self.args else ""


class NonFiniteError(LoxError, FloatingPointError):
    """A logged value that is NaN or infinite.

    Attributes:
        key: What it is called.
        path: Which array of it, if the value is a pytree.
        value: The array.
        steps: The steps it was logged with.
        lane: The index in each vmap around it, outermost first; empty if there is none.
        site: The line that logged it.
    """

    def __init__(self, key: str, path: str, value: Any, steps: dict[str, Any], lane: tuple[int, ...], site: str):
        super().__init__(key, path, value, steps, lane, site)
        self.key, self.path, self.value, self.steps, self.lane, self.site = key, path, value, steps, lane, site

    def __str__(self) -> str:
        wide = np.asarray(self.value).astype(np.complex128)
        nan, infinite = np.isnan(wide), np.isinf(wide)
        if wide.shape:
            first = np.argwhere(nan | infinite)[0].tolist()
            parts = [f"{count.sum()} {name}" for count, name in ((nan, "NaN"), (infinite, "infinite")) if count.any()]
            what = f"has {' and '.join(parts)} of {wide.size} values, the first at {first}"
        else:
            what = "is NaN" if nan else f"is {self.value}"
        steps = "".join(f" at {name}={step}" for name, step in self.steps.items())
        lane = self.lane[0] if len(self.lane) == 1 else self.lane
        lanes = f" in lane {lane}" if self.lane else ""
        return f"{self.key!r}{self.path} {what}{steps}{lanes}.\n  logged at {self.site}"


class StoreError(LoxError, OSError):
    """A file that cannot be written or read; `filename` says which."""

    def __str__(self) -> str:
        # Not that of OSError, which knows only numbers and file names.
        return str(self.args[0]) if self.args else ""


class RunNotFoundError(StoreError, FileNotFoundError):
    """No such run, or no runs at all."""


class RunExistsError(StoreError, FileExistsError):
    """A run that shall not be there, but is."""


class LoxWarning(UserWarning):
    """Something a user should know, such as events dropped for want of capacity."""


for _name in list(globals()):
    # In tracebacks as users know them: lox.SpoolError.
    if isinstance(globals()[_name], type) and issubclass(globals()[_name], LoxError | LoxWarning):
        globals()[_name].__module__ = "lox"


def listing(names: Iterable[str]) -> str:
    """Names as a person would list them: `'a', 'b' and 'c'`."""
    quoted = [repr(n) for n in names]
    if len(quoted) < 2:
        return "".join(quoted) or "none"
    return f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def nearest(name: str, names: Iterable[str]) -> str:
    """` Did you mean 'x'?`, if one of the names is close to the one given; else nothing."""
    names = list(names)
    # The same but for a scope or a prefix, or else what is spelt alike.
    found = [n for n in names if n.endswith(f"/{name}") or name.endswith(f"/{n}")]
    found = found or difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {found[0]!r}?" if found else ""


def unbounded_loop(key: str, site: str) -> SpoolError:
    """For a key that is stacked inside a loop of unknown length."""
    return SpoolError(
        f"`lox.spool` cannot return {key!r}: it is logged inside `while_loop`, whose length is unknown.\n"
        f"  logged at {site}\n"
        "Either give the loop room:   lox.spool(f, capacity=1000)\n"
        'or reduce while it runs:     lox.spool(f, reduce="mean")\n'
        "or stream the events:        lox.tap(f, callback)"
    )


def unreduced(key: str, site: str, axes: Iterable[str]) -> LogTypeError:
    """For a value that leaves for the host while its devices hold the terms of a sum."""
    where = f"  logged at {site}\n" if site else ""
    return LogTypeError(
        f"cannot send {key!r} to the host: it is unreduced over the mesh axes {listing(axes)}, "
        f"each device has one term of its sum.\n{where}"
        "Either add them up first:       lox.log({...: jax.reshard(x, jax.P())})\n"
        "or return it with the others:   lox.spool(f)"
    )


def partly_explicit(key: str, site: str, axes: Iterable[str]) -> TransformError:
    """For a host call that JAX has no way to make."""
    where = f"  logged at {site}\n" if site else ""
    return TransformError(
        f"cannot send {key!r} to the host from a shard_map that is manual over some mesh axes while {listing(axes)} "
        f"are explicit: JAX before 0.11 has no host calls there.\n{where}"
        "Either let the others be automatic:   jax.make_mesh(..., axis_types=(AxisType.Auto, ...))\n"
        "or return the logs:                   lox.spool(f)"
    )


def cannot_write(file: object, error: OSError, way_out: str) -> StoreError:
    """For what the operating system refuses to write."""
    # With one argument, so that the message is ours and not "[Errno 28] ...".
    refused = StoreError(f"cannot write {str(file)!r}: {error.strerror or error}.\n{way_out}")
    refused.errno, refused.filename = error.errno, str(file)
    return refused


def cannot_read(file: object, error: OSError) -> StoreError:
    """For what the operating system refuses to read."""
    refused = StoreError(
        f"cannot read {str(file)!r}: {error.strerror or error}.\nMake the file readable, or load another directory."
    )
    refused.errno, refused.filename = error.errno, str(file)
    return refused


def opaque_primitive(name: str, keys: Sequence[str], site: str) -> TransformError:
    """For a log inside a primitive without a rule."""
    return TransformError(
        f"cannot reach the log of {listing(keys) if keys else 'an unknown key'}: it is inside `{name}`, "
        "whose body lox does not know how to rewrite.\n"
        f"  logged at {site}\n"
        "Either log the value outside:   return it from the function and `lox.log` it there\n"
        "or remove the log:              delete the `lox.log` call inside the primitive's body"
    )


def executable(keys: Iterable[str], site: str) -> TransformError:
    """For a log inside a compiled program that a transformed function calls."""
    return TransformError(
        f"cannot reach the log of {listing(keys)}: it is inside an executable, which is compiled already.\n"
        f"  logged at {site}\n"
        "Either call the jitted function:      jax.jit(f) instead of jax.jit(f).lower(...).compile()\n"
        "or compile the transformed function:  jax.jit(lox.spool(f)).lower(...).compile()"
    )


def exported(keys: Iterable[str], site: str) -> TransformError:
    """For a log that would print, inside a function that `jax.export` writes to a file."""
    return TransformError(
        f"cannot export the log of {listing(keys)}: nothing around it takes it, so that it calls the host to print, "
        "and `jax.export` writes no such calls.\n"
        f"  logged at {site}\n"
        "Either return the logs:   jax.export.export(jax.jit(lox.spool(f)))\n"
        "or leave them out:        jax.export.export(jax.jit(lox.nolog(f)))"
    )


def unsettled(keys: Iterable[str]) -> TransformError:
    """For a block that never leaves the state of its keys with the type it found: a mistake of lox's, but no hang."""
    return TransformError(
        f"cannot trace a block that logs {listing(keys)}: what is kept of it changes its type each time.\n"
        "Please report this. Until then, `lox.tap` without options keeps nothing."
    )


def runs_later(fun: Any, what: str) -> LogTypeError:
    """For a generator or a coroutine: its body runs when it is used, and not when it is called."""
    name = getattr(fun, "__name__", repr(fun))
    return LogTypeError(
        f"cannot transform {name!r}: it returns a {what}, whose logs happen when it is used, out of lox's sight.\n"
        "Transform the function that uses it, or return a list instead."
    )


def different_lanes(key: str, first: object, first_site: str, second: object, second_site: str) -> MismatchError:
    """For a key logged under two vmaps, of different size or name; `first` and `second` are the lanes."""
    where = f"  {first} at {first_site}\n  {second} at {second_site}\n"
    if str(first_site) == str(second_site):
        where = f"  {first}, and then {second}, at {first_site}\n"
    return MismatchError(
        f"{key!r} is logged under different vmaps, whose lanes do not fit together:\n{where}"
        'Either keep them apart:      `with lox.scope("eval"):` around one of them\n'
        "or stream them one by one:   lox.tap(f, callback)\n"
        "or leave the key out:        `argnames` with the other keys"
    )


def mismatch(key: str, what: str, first: object, first_site: str, second: object, second_site: str) -> MismatchError:
    """For a key logged with two shapes, structures or reductions."""
    return MismatchError(
        f"{key!r} is logged with different {what}:\n"
        f"  {first} at {first_site}\n"
        f"  {second} at {second_site}\n"
        f"All events of a key are collected together. Use two keys, or make the {what} the same."
    )
