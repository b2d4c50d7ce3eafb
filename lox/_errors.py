"""What lox raises. Messages say which key, where it was logged, what is wrong and what to do instead."""

import difflib
import errno
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
    """A key that was logged in ways that do not fit together."""


class LogTypeError(LoxError, TypeError):
    """Something that cannot be logged."""


class OptionError(LoxError, ValueError):
    """An option that does not exist or makes no sense."""


class StepError(LoxError, AttributeError):
    """A step that was never logged."""


class KeyNotFoundError(LoxError, KeyError):
    """A key that was never logged."""

    def __str__(self) -> str:
        # KeyError would show the message in quotes.
        return str(self.args[0]) if self.args else ""


class NonFiniteError(LoxError, FloatingPointError):
    """A logged value that is NaN or infinite, found by `watch`.

    Attributes:
        key: The key of the value.
        path: The tree path of the array, if the value is a pytree.
        value: The array. If it is large and on several devices, its first element that is NaN or infinite, whose
            place is in `path`. None if only another process of the program knows.
        steps: The steps it was logged with.
        lane: The index in each surrounding vmap, outermost first; empty if there is none.
        site: The line that logged it.
        logs: The last events up to this one, as a `logdict` of NumPy arrays with an event axis: of all keys and lanes
            with `lox.watch(f, last=100)`, else of the keys that were logged together with it. None if only another
            process of the program knows.
    """

    def __init__(
        self,
        key: str,
        path: str,
        value: Any,
        steps: dict[str, Any],
        lane: tuple[int, ...],
        site: str,
        logs: Any = None,
    ):
        super().__init__(key, path, value, steps, lane, site)  # not the logs: they would fill a screen
        self.key, self.path, self.value, self.steps, self.lane, self.site = key, path, value, steps, lane, site
        self.logs = logs

    def __str__(self) -> str:
        if self.value is None:
            return "a logged value is NaN or infinite in another process of this program, which says what and where."
        wide = np.asarray(self.value).astype(np.complex128)
        nan, infinite = np.isnan(wide), np.isinf(wide)
        if wide.shape:
            first = np.argwhere(nan | infinite)[0].tolist()
            parts = [f"{count.sum()} {name}" for count, name in ((nan, "NaN"), (infinite, "infinite")) if count.any()]
            what = f"has {' and '.join(parts)} of {wide.size} values, the first at {first}"
        else:
            what = "is NaN" if nan else f"is {self.value}"
        steps = "".join(f" at {printable(name)}={step}" for name, step in self.steps.items())
        lane = self.lane[0] if len(self.lane) == 1 else self.lane
        lanes = f" in lane {lane}" if self.lane else ""
        return f"{self.key!r}{self.path} {what}{steps}{lanes}.\n  logged at {self.site}"


class StoreError(LoxError, OSError):
    """A file that cannot be written or read: `filename`."""

    def __str__(self) -> str:
        # OSError would show only its number and file name.
        return str(self.args[0]) if self.args else ""


class RunNotFoundError(StoreError, FileNotFoundError):
    """No such run, or no runs at all."""


class RunExistsError(StoreError, FileExistsError):
    """A run that exists where none may."""


class LoxWarning(UserWarning):
    """Something a user should know, such as events dropped for lack of capacity."""


for _name in list(globals()):
    # So that tracebacks show the public name, lox.SpoolError.
    if isinstance(globals()[_name], type) and issubclass(globals()[_name], LoxError | LoxWarning):
        globals()[_name].__module__ = "lox"


def listing(names: Iterable[str]) -> str:
    """List names as a person would: `'a', 'b' and 'c'`."""
    quoted = [repr(n) for n in names]
    if len(quoted) < 2:
        return "".join(quoted) or "none"
    return f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def printable(text: str) -> str:
    """Replace characters that would act on a terminal, or that it cannot show."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def encodable(text: str) -> str:
    """Replace half characters (lone surrogates) by their codes: files, clients and notebooks cannot encode them."""
    return text.encode(errors="backslashreplace").decode()


def nearest(name: str, names: Iterable[str]) -> str:
    """Ask ` Did you mean 'x'?` if one of the names is close to the given one; else return an empty string."""
    names = list(names)
    # The same name in another scope comes before one with a similar spelling.
    close = [n for n in names if n.endswith(f"/{name}") or name.endswith(f"/{n}")]
    close = close or difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def unbounded_loop(key: str, site: str, given: Iterable[str] = ()) -> SpoolError:
    """For a key that is stacked inside a loop of unknown length; others are `given` a capacity."""
    others = f"`capacity` names {listing(given)} only.\n" if given else ""
    return SpoolError(
        f"`lox.spool` cannot return {key!r}: it is logged inside `while_loop`, whose length is unknown.\n"
        f"  logged at {site}\n{others}"
        "Either give the loop room:   lox.spool(f, capacity=1000)\n"
        'or reduce while it runs:     lox.spool(f, reduce="mean")\n'
        "or stream the events:        lox.tap(f, callback)"
    )


def in_other_processes(keys: Iterable[str], shape: tuple[int, ...]) -> LogTypeError:
    """Return the error for a value of which this process has only a part."""
    return LogTypeError(
        f"{listing(keys) or 'a step'} has an array of shape {shape} that is spread over several processes: each has a "
        "part of it.\n"
        "Either log what all of them have, such as a mean, a norm or a `lox.Histogram`, computed inside of `jit`,\n"
        "or give it to a `lox.SaveLogger`, which writes the parts: `logger.log(state, logs)`."
    )


def elsewhere(keys: Iterable[str], shape: tuple[int, ...]) -> LogTypeError:
    """Return the error for a value of which this process has nothing."""
    return LogTypeError(
        f"one of {listing(keys)} is an array of shape {shape} on devices of another process, which does not know that "
        "it is the only one to have it. Spread it over all processes, or put it on devices of each of them."
    )


def of_this_process(logger: str) -> LoxError:
    """Return the error for events of a process whose logger writes nothing."""
    return LoxError(
        f"events of the devices of this process were not written: {logger} writes in the first process. Set "
        '`logger.process = "all"` for runs of every process, or use a `lox.SaveLogger`, to which all of them write.'
    )


def keys_in_other_processes() -> LogTypeError:
    """Return the error for runs that not all processes can begin."""
    return LogTypeError(
        "`init` got PRNG keys or a config that are spread over several processes, each of which has a part. Every "
        "process begins all runs: give it arrays that all have, such as `jax.random.split(jax.random.key(0), 64)`."
    )


def unreduced(key: str, site: str, axes: Iterable[str]) -> LogTypeError:
    """For a value that is sent to the host while each device holds one term of its sum."""
    logged_at = f"  logged at {site}\n" if site else ""
    return LogTypeError(
        f"cannot send {key!r} to the host: it is unreduced over the mesh axes {listing(axes)}, "
        f"so each device has one term of its sum.\n{logged_at}"
        "Either add them up first:       lox.log({...: jax.reshard(x, jax.P())})\n"
        "or return it with the others:   lox.spool(f)"
    )


def gathered(key: str, site: str, shape: tuple[int, ...], most: int) -> str:
    """What is wrong with a large value that is sent to the host from a program on several devices."""
    logged_at = f"  logged at {site}\n" if site else ""
    return (
        f"cannot send {key!r} of shape {shape} to the host from a program on several devices: it has more than {most} "
        f"elements, whose parts would be gathered from all of them at every event.\n{logged_at}"
        "Either log what is small:          lox.Histogram(x), a mean, a norm\n"
        "or log the part of each device:    inside of `jax.shard_map`\n"
        "or leave it where it is:           lox.spool(f)"
    )


def partly_explicit(key: str, site: str, axes: Iterable[str]) -> TransformError:
    """For a host call that JAX cannot make."""
    logged_at = f"  logged at {site}\n" if site else ""
    return TransformError(
        f"cannot send {key!r} to the host from a shard_map that is manual over some mesh axes while {listing(axes)} "
        f"are explicit: JAX before 0.11 has no host calls there.\n{logged_at}"
        "Either make the others automatic:   jax.make_mesh(..., axis_types=(AxisType.Auto, ...))\n"
        "or return the logs:                 lox.spool(f)"
    )


def cannot_write(file: object, error: OSError, way_out: str) -> StoreError:
    """For a file that the operating system refuses to write."""
    return _refused("write", file, error, way_out)


def cannot_read(file: object, error: OSError) -> StoreError:
    """For a file that the operating system refuses to read."""
    return _refused("read", file, error, "Make the file readable, or load another directory.")


def lost_file(file: object, runs: Sequence[str]) -> StoreError:
    """For a file that is no longer there while runs are being written to it."""
    more = f" and {len(runs) - 1} others have lost their files" if len(runs) > 1 else " has lost its file"
    lost = StoreError(
        f"run {runs[0]!r}{more}: {str(file)!r} was removed or renamed while it was written.\n"
        "What was in it and what is logged now is lost with it. Begin another run with `init`."
    )
    lost.errno, lost.filename = errno.ENOENT, str(file)
    return lost


def _refused(what: str, file: object, error: OSError, way_out: str) -> StoreError:
    # With a single argument, OSError keeps our message instead of "[Errno 28] ...".
    refused = StoreError(f"cannot {what} {str(file)!r}: {error.strerror or error}.\n{way_out}")
    refused.errno, refused.filename = error.errno, str(file)
    return refused


def opaque_primitive(name: str, keys: Sequence[str], site: str) -> TransformError:
    """For a log inside a primitive without a rule."""
    return TransformError(
        f"cannot reach the log of {listing(keys) if keys else 'an unknown key'}: it is inside `{name}`, "
        "whose body lox does not know how to rewrite.\n"
        f"  logged at {site}\n"
        "Either log the value outside:   return it from the function and `lox.log` it there\n"
        "or remove the log:              delete the `lox.log` call inside the primitive's body\n"
        'or teach lox the primitive:     by one function, see "Add a rule" in CONTRIBUTING.md'
    )


def executable(keys: Iterable[str], site: str) -> TransformError:
    """For a log inside a compiled program that a transformed function calls."""
    return TransformError(
        f"cannot reach the log of {listing(keys)}: it is inside an executable, which is already compiled.\n"
        f"  logged at {site}\n"
        "Either call the jitted function:      jax.jit(f) instead of jax.jit(f).lower(...).compile()\n"
        "or compile the transformed function:  jax.jit(lox.spool(f)).lower(...).compile()"
    )


def exported(keys: Iterable[str], site: str) -> TransformError:
    """For a log that would print, inside a function that is exported."""
    return TransformError(
        f"cannot export the log of {listing(keys)}: no transformation takes it, so it calls the host to print, "
        "and `jax.export` cannot save such calls.\n"
        f"  logged at {site}\n"
        "Either return the logs:   jax.export.export(jax.jit(lox.spool(f)))\n"
        "or leave them out:        jax.export.export(jax.jit(lox.nolog(f)))"
    )


def unsettled(keys: Iterable[str]) -> TransformError:
    """For a loop whose state changes its type every time it is traced: a bug in lox, reported instead of hanging."""
    return TransformError(
        f"cannot trace a loop or branch that logs {listing(keys)}: the state of its logs changes type every time.\n"
        "This is a bug in lox: please report it. Until it is fixed, `lox.tap` without options keeps no state."
    )


def runs_later(fun: Any, what: str) -> LogTypeError:
    """For a generator or a coroutine, whose body runs when it is used and not when it is called."""
    name = getattr(fun, "__name__", repr(fun))
    return LogTypeError(
        f"cannot transform {name!r}: it returns a {what}, which logs only when it is used, where lox cannot see it.\n"
        "Transform the function that uses it, or return a list instead."
    )


def different_lanes(key: str, first: object, first_site: str, second: object, second_site: str) -> MismatchError:
    """For a key logged under two vmaps of different size or name; `first` and `second` are the lanes."""
    both = f"  {first} at {first_site}\n  {second} at {second_site}\n"
    if str(first_site) == str(second_site):
        both = f"  {first}, and then {second}, at {first_site}\n"
    return MismatchError(
        f"{key!r} is logged under different vmaps, whose lanes do not fit together:\n{both}"
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
