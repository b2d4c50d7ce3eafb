"""The files themselves: other tools, unusual keys, and all kinds of damage."""

import contextlib
import itertools
import json
import os
import shutil
import struct
import tempfile
import tracemalloc
import warnings
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from exact import f32, same
from optional import HealthCheck, duckdb, given, pandas, polars, pyarrow, settings, st

import lox
from lox.store import Reader, Writer, _flatbuffers, _record_batch, _schema


def segments(path):
    return sorted(path.glob("*/*.arrows"))


# --- other tools ---


def write(path, count):
    """Write runs with all kinds of columns; return the segment."""
    with Writer(path) as writer:
        runs = writer.open_runs([str(n) for n in range(count)])
        for i in range(5):
            logs = lox.logdict.from_arrays(
                {
                    "loss": f32([i + n / 2 for n in range(count)]),
                    "flag": np.asarray([i % 2 == n % 2 for n in range(count)]),
                    "grad": np.full((count, 3), i, np.float64),
                    "half": np.full((count,), i, ml_dtypes.bfloat16),
                    "z": np.full((count,), 1j * i, np.complex64),
                    "key": np.arange(count, dtype=np.uint32),
                    "nothing": np.zeros((count, 0)),
                },
                steps={"step": np.int32(i)},
                events=False,
                lanes=1,
            )
            writer.append(runs, logs)
    (segment,) = segments(path)
    return segment


@pytest.fixture
def one_run(tmp_path):
    return write(tmp_path / "one", 1)


@pytest.fixture
def two_runs(tmp_path):
    return write(tmp_path / "two", 2)


STEPS = [0, 1, 2, 3, 4]
COLUMNS = ["run", "wall", "step", "loss", "flag", "grad", "half", "z", "key", "nothing"]


def test_pyarrow(one_run):
    table = pyarrow.ipc.open_stream(one_run).read_all()
    table.validate(full=True)
    assert table.column_names == COLUMNS
    assert table["run"].to_pylist() == [0] * 5
    assert table["step"].to_pylist() == table["loss"].to_pylist() == table["half"].to_pylist() == STEPS
    assert table["flag"].to_pylist() == [True, False, True, False, True]
    assert table["grad"].to_pylist() == [[i] * 3 for i in STEPS]
    assert table["z"].to_pylist() == [[0, i] for i in STEPS]
    assert table["nothing"].null_count == 5
    metadata = table.schema.field("half").metadata
    assert metadata[b"role"] == b"value"
    assert json.loads(metadata[b"key"]) == "half"
    assert metadata[b"dtype"] == b"bfloat16"
    assert table.schema.metadata[b"format"] == b"lox-arrow/2"


def test_pyarrow_with_several_runs(two_runs):
    """A row has an event of all runs; what differs between them is a list, what does not is there once."""
    table = pyarrow.ipc.open_stream(two_runs).read_all()
    table.validate(full=True)
    assert table.column_names == COLUMNS
    assert table["run"].to_pylist() == [0] * 5
    assert table["step"].to_pylist() == STEPS
    assert table["loss"].to_pylist() == [[i, i + 0.5] for i in STEPS]
    assert table["flag"].to_pylist() == [[i % 2 == 0, i % 2 == 1] for i in STEPS]
    assert table["grad"].to_pylist() == [[i] * 6 for i in STEPS]
    assert table["z"].to_pylist() == [[0, i, 0, i] for i in STEPS]
    assert table.schema.metadata[b"runs"] == table.schema.field("loss").metadata[b"runs"] == b"2"
    assert b"runs" not in table.schema.field("step").metadata


def test_pandas(one_run):
    frame = pandas.DataFrame(pyarrow.ipc.open_stream(one_run).read_all().drop(["nothing"]).to_pandas())
    assert frame["loss"].tolist() == STEPS


def test_polars(one_run):
    frame = polars.read_ipc_stream(one_run)
    assert frame["loss"].to_list() == STEPS
    assert frame["grad"].to_list() == [[i] * 3 for i in STEPS]
    assert frame.filter(polars.col("step") == 3)["half"].to_list() == [3]


def test_polars_with_several_runs(two_runs):
    frame = polars.read_ipc_stream(two_runs).select("run", "step", "loss")
    frame = frame.with_columns(polars.int_ranges("run", polars.col("run") + 2)).explode("run", "loss")
    assert frame.sort("run", "step").rows() == [(n, i, i + n / 2) for n in range(2) for i in STEPS]


def test_duckdb(one_run, two_runs):
    # DuckDB's reader of Arrow files is an extension to download, but it reads pyarrow's tables.
    t, wide = (pyarrow.ipc.open_stream(segment).read_all() for segment in (one_run, two_runs))
    actual = duckdb.sql("select run, max(loss), sum(grad[1]) from t group by run", connection=_connect(t=t))
    assert actual.fetchall() == [(0, 4.0, 10.0)]
    tidy = "select run + generate_subscripts(loss::float[], 1) - 1 as run, unnest(loss) as loss from wide"
    actual = duckdb.sql(
        f"select run, max(loss) from ({tidy}) group by run order by run", connection=_connect(wide=wide)
    )
    assert actual.fetchall() == [(0, 4.0), (1, 4.5)]


def _connect(**tables):
    connection = duckdb.connect()
    for name, table in tables.items():
        connection.register(name, table)
    return connection


def test_open_segments_are_readable_too(tmp_path):
    with Writer(tmp_path) as writer:
        writer.append(writer.open_run(), {"x": f32([1, 2])})
        writer.flush()
        (segment,) = segments(tmp_path)
        assert pyarrow.ipc.open_stream(segment).read_all()["x"].to_pylist() == [[1, 2]]
        assert polars.read_ipc_stream(segment)["x"].to_list() == [[1, 2]]


# --- keys are data ---

HOSTILE = [
    "../evil",
    "/etc/passwd",
    "",
    "a\nb",
    "a\0b",
    "x" * 10_000,
    "żółć 🦊",
    "\ud800",
    "run",
    "wall",
    "step",
    'quote"quote',
    "{}",
    "con.arrows",
    ".",
    "a/b",
    "\\",
]


def test_hostile_keys(tmp_path):
    inside = tmp_path / "deep" / "inside"
    logs = lox.logdict({key: {key: f32(i)} for i, key in enumerate(HOSTILE)})
    logs.steps = {key: {other: np.int32(7) for other in HOSTILE} for key in HOSTILE if key}
    lox.save(logs, inside)
    loaded = lox.load(inside)
    same(loaded, {key: {key: f32([i])} for i, key in enumerate(HOSTILE)})
    assert set(loaded.steps) == set(HOSTILE) - {""}
    written = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert sorted(p.name for p in written) == ["meta.json", "p0000-000.arrows", "runs.jsonl"]
    assert all(p.parent.parent == inside for p in written)
    (segment,) = segments(inside)
    table = pyarrow.ipc.open_stream(segment).read_all()
    assert len(set(table.column_names)) == len(table.column_names)
    assert polars.read_ipc_stream(segment).height == 1


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_of_runs(tmp_path, name):
    with Writer(tmp_path) as writer:
        writer.append(writer.open_run(name), {"x": f32(1)})
        writer.append(writer.open_run(name, config={name: name}), {"x": f32(2)})
    first, second = lox.runs(tmp_path)
    assert (first.name, second.name) == (name, f"{name}.1")
    assert second.config == {name: name}
    assert lox.load(tmp_path, name)["x"].tolist() == [1]


def test_files_of_others_are_ignored(tmp_path):
    lox.save({"x": 1}, tmp_path)
    (group,) = tmp_path.iterdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "p0000-000.arrows").write_bytes(b"nonsense")
    (tmp_path / "runs.jsonl").write_text("nonsense")
    (group / "mine.arrows").write_bytes(b"nonsense")
    assert lox.load(tmp_path)["x"].tolist() == [1]


def test_there_is_no_pickle():
    for file in Path(lox.store.__file__).parent.glob("*.py"):
        text = file.read_text()
        assert "import pickle" not in text and "allow_pickle" not in text and "eval(" not in text


# --- damage ---


def save_some(path, runs=3, flushes=4):
    with Writer(path) as writer:
        numbers = writer.open_runs(key_data=[[0, i] for i in range(runs)])
        for i in range(flushes):
            for run in numbers:
                steps = np.arange(i * 10, i * 10 + 10)
                arrays = {"x": steps * 1.5, "m": {"a": np.ones((10, 2), bool)}}
                logs = lox.logdict.from_arrays(arrays, steps={"step": steps})
                writer.append(run, logs)
            writer.append(numbers[0], {"k": np.arange(4, dtype=ml_dtypes.int4)})
            writer.flush()


def test_a_torn_tail(tmp_path):
    lox.save({"x": np.arange(100.0)}, tmp_path)
    with Writer(tmp_path) as writer:
        run = writer.open_run("run", mode="append")
        for i in range(3):
            writer.append(run, {"x": np.arange(100.0) + i})
            writer.flush()
    segment = segments(tmp_path)[1]
    whole = segment.read_bytes()
    batch = (len(whole) - 8 - len(schema_bytes(whole))) // 3
    segment.write_bytes(whole[: len(whole) - 8 - batch // 2])
    with pytest.raises((polars.exceptions.PolarsError, OSError)):
        polars.read_ipc_stream(segment)
    with pytest.warns(lox.LoxWarning, match=r"1 damaged files.*\n.*p0000-000.arrows': \d+ bytes.*incomplete") as warned:
        logs = lox.load(tmp_path)
    assert len(warned) == 1
    reader = Reader(tmp_path)
    reader.refresh()
    assert reader.skipped() == {str(segment): batch - batch // 2}
    assert "lox.store.repair(" in str(warned[0].message)
    assert logs["x"][:, 0].tolist() == [0, 0, 1]
    cut = lox.store.repair(tmp_path)
    assert cut == {str(segment): batch - batch // 2}
    assert lox.load(tmp_path)["x"][:, 0].tolist() == [0, 0, 1]  # and no warning
    assert polars.read_ipc_stream(segment).height == 2
    assert lox.store.repair(tmp_path) == {}


def schema_bytes(data):
    return data[: 8 + _schema.message_size(data[:8])]


def test_not_even_a_schema(tmp_path):
    lox.save({"x": 1}, tmp_path)
    (segment,) = segments(tmp_path)
    segment.write_bytes(segment.read_bytes()[:50])
    with pytest.warns(lox.LoxWarning, match="50 bytes at its end"):
        assert list(lox.load(tmp_path)) == []
    assert lox.store.repair(tmp_path) == {str(segment): 50}
    assert not segment.exists()


def test_damage_in_the_middle(tmp_path):
    save_some(tmp_path)
    segment = segments(tmp_path)[0]
    data = bytearray(segment.read_bytes())
    schema = len(schema_bytes(bytes(data)))
    data[schema + 100] ^= 255  # the header of the first batch
    segment.write_bytes(data)
    with pytest.raises(lox.StoreError, match="bytes after row 0, which had events of 'x' and 'm', are not what lox"):
        lox.load(tmp_path).stack()
    with pytest.warns(lox.LoxWarning, match="What was there was left out"):
        rest = lox.load(tmp_path, damaged="skip").stack()
    assert rest
    (cut,) = lox.store.repair(tmp_path).values()
    assert segment.stat().st_size == len(data) - cut
    assert segment.with_name(segment.name + ".damaged").read_bytes() == data[schema : schema + cut]
    same(lox.load(tmp_path).stack(), rest)


@pytest.mark.parametrize("damaged", [[0], [5], [3, 4], [0, 2, 9], [10, 11]])
def test_headers_that_are_damaged(tmp_path, damaged):
    """Every other batch is found, but those at the end cannot be told from what a crash leaves."""
    with Writer(tmp_path) as writer:
        run = writer.open_run("a")
        for n in range(12):
            for i in range(n % 3 + 1):
                writer.append(run, {"x": np.int32(10 * n + i)})
            writer.flush()
    (file,) = segments(tmp_path)
    reader = Reader(tmp_path)
    reader.refresh()
    (segment,) = [s for g in reader._catalog.groups.values() for s in g.segments.values()]
    data = bytearray(file.read_bytes())
    for n in damaged:
        data[segment.offsets[n] + 50] ^= 1
    file.write_bytes(data)
    last = damaged == [10, 11]
    expected = [10 * n + i for n in range(12) if n not in damaged for i in range(n % 3 + 1)]
    with pytest.warns(lox.LoxWarning, match="no batch begins here" if last else "was left out"):
        assert lox.load(tmp_path, damaged="skip")["x"].tolist() == expected
    if not last:
        with pytest.raises(lox.StoreError, match="which had events of 'x'"):
            lox.load(tmp_path)
        with pytest.raises(lox.StoreError, match="which had events of 'x'"):
            Reader(tmp_path).poll()
    lox.store.repair(tmp_path)
    assert lox.load(tmp_path)["x"].tolist() == expected
    if pyarrow is not None:
        with open(file, "rb") as stream:
            assert pyarrow.ipc.open_stream(stream).read_all().num_rows == len(expected)


def test_files_of_a_living_writer_are_not_repaired(tmp_path):
    with Writer(tmp_path) as writer:
        writer.append(writer.open_run(), {"x": f32(1)})
        writer.flush()
        (segment,) = segments(tmp_path)
        with open(segment, "ab") as file:
            file.write(b"\xff\xff")  # the first bytes of a batch that is being written
        assert lox.load(tmp_path)["x"].tolist() == [1]  # no warning, because it is being written
        with pytest.warns(lox.LoxWarning, match="left alone: its writer seems to be alive"):
            assert lox.store.repair(tmp_path) == {}
        assert lox.store.repair(tmp_path, force=True) == {str(segment): 2}


def test_meta_of_another_format(tmp_path):
    lox.save({"x": 1}, tmp_path)
    (meta,) = tmp_path.glob("*/meta.json")
    meta.write_text(meta.read_text().replace("lox-arrow/2", "lox-arrow/9"))
    with pytest.raises(lox.StoreError, match=r"of format 'lox-arrow/9'; this lox reads 'lox-arrow/2'.\nInstall"):
        lox.load(tmp_path)
    meta.write_text("{")
    with pytest.raises(lox.StoreError, match=r"meta.json' is damaged.*\nDelete that one file"):
        lox.load(tmp_path)
    meta.unlink()
    assert lox.load(tmp_path)["x"].tolist() == [1]


def test_damaged_runs(tmp_path):
    save_some(tmp_path, runs=2)
    (runs,) = tmp_path.glob("*/runs.jsonl")
    first, second = runs.read_text().splitlines()
    runs.write_text(f"{first[:-5]}\n{second}\n{{}}\n[1]\n")
    with pytest.warns(lox.LoxWarning, match=r"1 damaged files.*\n.*runs.jsonl': 3 damaged lines"):
        assert lox.load(tmp_path, jax.random.key(1))["x"].tolist() == [1.5 * i for i in range(40)]
    runs.write_text(f"{first}\n{second}")  # the last line is incomplete, though the group is closed
    with pytest.warns(lox.LoxWarning, match=rf"runs.jsonl' has {len(first) + len(second) + 1} of"):
        assert [run.name for run in lox.runs(tmp_path)] == ["0"]


def small_store(path):
    """A closed group with two runs, and steps, lanes and dtypes of several kinds."""
    with Writer(path) as writer:
        runs = writer.open_runs(["a", "b"], configs=[{"lr": 0.1}, {"lr": float("nan")}])
        for i in range(2):
            logs = {"x": np.arange(3.0) + i, "on": np.array([True, False]), "h": np.float16(i)}
            writer.append(runs[i % 2], lox.logdict(logs, steps={"step": {"x": i}}))
            writer.flush()
        writer.append(runs, {"both": np.arange(2, dtype=np.int32)})


def read_all(path):
    return {run.name: (str(run.config), str(lox.load(path, run.name))) for run in lox.runs(path)}


@pytest.mark.slow
def test_every_flipped_byte_is_found_or_without_effect(tmp_path, request):
    """`LOX_FLIPS=255` flips each byte in as many ways; without `--nightly`, it is every tenth byte."""
    every = 1 if request.config.option.nightly else 10
    small_store(tmp_path)
    expected, found, without = read_all(tmp_path), 0, 0
    for file in [*tmp_path.glob("*/meta.json"), *tmp_path.glob("*/runs.jsonl"), *segments(tmp_path)]:
        whole = file.read_bytes()
        for position, n in itertools.product(range(0, len(whole), every), range(int(os.environ.get("LOX_FLIPS", 1)))):
            mask = 1 + (37 * position + n) % 255
            file.write_bytes(whole[:position] + bytes([whole[position] ^ mask]) + whole[position + 1 :])
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                try:
                    got = read_all(tmp_path)
                except lox.LoxError:
                    found += 1
                    continue
            if warned:
                found += 1
            else:
                assert got == expected, f"byte {position} of {file.name}"
                without += 1
        file.write_bytes(whole)
    assert read_all(tmp_path) == expected
    assert found > 5 * without  # what is left is padding, and what only other tools read


@pytest.mark.parametrize("key", ["x", "on", "h", "both"])
def test_damaged_rows_are_named_skipped_and_taken_out(tmp_path, key):
    small_store(tmp_path)
    expected = {run.name: lox.load(tmp_path, run.name) for run in lox.runs(tmp_path)}
    (file,) = [f for f in segments(tmp_path) if f'"{key}"'.encode() in schema_bytes(f.read_bytes())]
    reader = Reader(tmp_path)
    reader.refresh()
    (segment,) = [s for g in reader._catalog.groups.values() for s in g.segments.values() if s.file == file]
    column = [c.name for c in segment.schema.columns].index(key)
    layout = segment._batches.layout(segment.rows[0])
    data = bytearray(file.read_bytes())
    data[segment.offsets[0] + layout.header_size + layout.offsets[column]] ^= 1
    file.write_bytes(data)
    match = rf"{file.name}' is damaged: '{key}' in rows 0 to \d+ does not have the checksum.*\nIt has events of 'a'"
    with pytest.raises(lox.StoreError, match=match + r"[\s\S]*damaged=\"skip\"[\s\S]*repair"):
        lox.load(tmp_path, "a")
    lox.load(tmp_path, "a", argnames=[k for k in expected["a"] if k != key])  # other keys are not concerned
    with pytest.warns(lox.LoxWarning, match=match + r"[\s\S]*rows were left out"):
        rest = lox.load(tmp_path, "a", damaged="skip")
    together = {"both"} if key == "both" else {"x"} if key == "x" else {"on", "h"} & expected["a"].keys()
    assert all(str(rest[k]) == str(expected["a"][k]) for k in expected["a"].keys() - together)
    assert not any(len(rest[k]) for k in together if k in rest)
    repaired = lox.store.repair(tmp_path)
    assert list(repaired) == [str(file)]
    assert sum(repaired.values()) == Path(f"{file}.damaged").stat().st_size
    assert str(lox.load(tmp_path, "a")) == str(rest)
    assert lox.store.repair(tmp_path) == {}
    import pyarrow

    pyarrow.ipc.open_stream(file).read_all()


def test_format_1_is_still_read(tmp_path):
    """Files of the version before checksums, and before runs shared rows."""
    path = tmp_path / "store"
    shutil.copytree(Path(__file__).parent / "data" / "format1", path)
    assert [(run.name, run.config) for run in lox.runs(path)] == [("7", {"lr": 0.5}), ("8", {"lr": 1.0})]
    logs = lox.load(path, jax.random.key(7))
    assert logs["loss"].tolist() == [9.0, 2.25, 0.5625, 5.0]
    assert logs.step["loss"].tolist() == [0, 1, 2, 3]
    assert logs["tree"]["a"].tolist() == [0.0, 1.5, 2.25]
    same(jax.random.key_data(logs["tree"]["k"]), jax.random.key_data(jax.vmap(jax.random.key)(np.arange(3))))
    assert logs["b"].dtype == ml_dtypes.bfloat16
    with lox.SaveLogger(path, mode="append") as logger:
        logger.log(logger.init(jax.random.key(8)), {"loss": f32(1)}, step=9)
    assert lox.load(path, jax.random.key(8))["loss"].tolist() == [9.0, 0.0, 0.0, 1.0]
    assert lox.store.repair(path) == {}


def test_a_segment_in_the_wrong_place_is_told(tmp_path):
    for run in (0, 1):
        lox.save({"x": f32(run)}, tmp_path, jax.random.key(run))
    first, second = segments(tmp_path)
    whole = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(whole)
    with pytest.warns(lox.LoxWarning, match="it was written as"):
        assert not len(lox.load(tmp_path, jax.random.key(0)))


@pytest.mark.parametrize("how", ["cut between batches", "empty", "missing"])
def test_a_file_that_lost_batches_is_told(tmp_path, how):
    small_store(tmp_path)
    file = segments(tmp_path)[0]
    reader = Reader(tmp_path)
    reader.refresh()
    (segment,) = [s for g in reader._catalog.groups.values() for s in g.segments.values() if s.file == file]
    if how == "missing":
        file.unlink()
    else:
        os.truncate(file, segment.offsets[1] if how == "cut between batches" else 0)
    for read in (lambda: lox.load(tmp_path, "a"), lambda: lox.runs(tmp_path)):
        with pytest.warns(lox.LoxWarning, match=rf"{file.name}' (has \d+ of \d+ bytes|is gone)"):
            read()


def swap(file, kind, outside):
    """Put something else in the place of a file."""
    whole = file.read_bytes()
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "link":
        outside.write_bytes(whole + b"precious")
        file.symlink_to(outside)
    else:
        file.write_bytes(whole)
        os.truncate(file, 1 << 36)  # sparse
    return whole + b"precious"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize("kind", ["fifo", "device", "link", "huge"])
@pytest.mark.parametrize("name", ["meta.json", "runs.jsonl", "p0000-000.arrows"])
def test_only_files_are_read_and_repaired(tmp_path, kind, name):
    lox.save({"x": f32(1)}, tmp_path / "store")
    outside = tmp_path / "mine"
    (file,) = (tmp_path / "store").glob(f"*/{name}")
    content = swap(file, kind, outside)
    tracemalloc.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lox.LoxWarning)
        for read in (
            lox.load,
            lox.runs,
            lox.store.repair,
            lambda path: lox.save({"x": f32(2)}, path, mode="overwrite"),
        ):
            with contextlib.suppress(lox.LoxError):
                read(tmp_path / "store")
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    if kind == "link":
        assert outside.read_bytes() == content


def test_a_link_to_a_group_is_not_followed(tmp_path):
    lox.save({"x": f32(1)}, tmp_path / "mine")
    lox.save({"x": f32(2)}, tmp_path / "store")
    (group,) = (tmp_path / "mine").iterdir()
    (tmp_path / "store" / group.name).symlink_to(group)
    assert lox.load(tmp_path / "store")["x"].tolist() == [2.0]
    lox.save({"x": f32(3)}, tmp_path / "store", mode="overwrite")
    assert lox.load(tmp_path / "mine")["x"].tolist() == [1.0]


def load_everything(path):
    """Do everything that reading does. Only lox's errors may be raised, and memory must be bounded by the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lox.LoxWarning)
        for read in (
            lambda: dict(lox.load(path)),
            lambda: lox.load(path).stack(),
            lambda: lox.load(path, jax.random.key(1)),
            lambda: lox.runs(path),
            lambda: Reader(path).poll(),
            lambda: lox.store.repair(path),
            lambda: lox.load(path),
        ):
            try:
                read()
            except (lox.LoxError, AttributeError) as error:
                # A single run has no `stack`.
                assert isinstance(error, lox.LoxError) or "no attribute 'stack'" in str(error)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    path = tmp_path_factory.mktemp("pristine")
    save_some(path)
    return path


def damaged_copy(pristine, which, change):
    directory = Path(tempfile.mkdtemp())
    shutil.copytree(pristine, directory / "store")
    files = sorted((directory / "store").glob("*/*"))
    file = files[which % len(files)]
    file.write_bytes(change(file.read_bytes()))
    return directory


edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "byte", "word", "cut", "insert", "zero", "repeat"]),
        st.integers(0, 10**6),
        st.one_of(st.integers(0, 255), st.sampled_from([2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1])),
    ),
    min_size=1,
    max_size=4,
)


def edited(data, edits):
    data = bytearray(data)
    for how, position, value in edits:
        at = position % max(1, len(data))
        if how == "flip":
            data[at : at + 1] = bytes(b ^ (1 << value % 8) for b in data[at : at + 1])
        elif how == "byte":
            data[at : at + 1] = bytes([value % 256])
        elif how == "word":
            at -= at % 8
            data[at : at + 8] = value.to_bytes(8, "little")
        elif how == "cut":
            del data[at:]
        elif how == "insert":
            data[at:at] = value.to_bytes(8, "little")
        elif how == "zero":
            data[at : at + 64] = bytes(len(data[at : at + 64]))
        else:
            data += data[at:]
    return bytes(data)


FUZZ = settings(
    max_examples=int(os.environ.get("LOX_DAMAGE_N", "50")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize="LOX_DAMAGE_N" not in os.environ,
)


@pytest.mark.slow
@FUZZ
@given(which=st.integers(0, 3), edits=edits)
def test_damaged_files_never_crash(pristine, which, edits):
    directory = damaged_copy(pristine, which, lambda data: edited(data, edits))
    tracemalloc.start()
    try:
        load_everything(directory / "store")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
        shutil.rmtree(directory)


@FUZZ
@given(which=st.integers(0, 3), data=st.binary(max_size=300), framed=st.booleans())
def test_invented_files_never_crash(pristine, which, data, framed):
    if framed:
        data = _schema.CONTINUATION + (len(data) + -len(data) % 8).to_bytes(4, "little") + data + bytes(-len(data) % 8)
    directory = damaged_copy(pristine, which, lambda _: data)
    try:
        load_everything(directory / "store")
    finally:
        shutil.rmtree(directory)


@pytest.mark.slow
@settings(FUZZ, max_examples=10 * FUZZ.max_examples)
@given(edits=edits)
def test_invented_schemas_never_crash(pristine, edits):
    """Return the schema, the only part of a segment with a complex structure."""
    file = segments(pristine)[0]
    message = schema_bytes(file.read_bytes())
    try:
        schema = _schema.decode(edited(message[8:], edits), f"{file.parent.name}/{file.name}")
    except _flatbuffers.DamagedError:
        return
    _record_batch.Batches(schema).layout(3)


def test_undamaged_runs_are_complete(pristine):
    """The fuzzing starts from readable files: on nonsense it would always pass."""
    runs = lox.load(pristine)
    assert list(runs) == ["0", "1", "2"]
    for logs in runs.values():
        assert logs["x"].tolist() == [1.5 * i for i in range(40)]
        assert logs["m"]["a"].all()
    assert runs["0"]["k"].shape == (4, 4)
    assert "k" not in runs["1"]


PLACE = "20260101T000000-000000-00000000/p0000-000.arrows"


def encode(schema):
    return _schema.encode(schema, PLACE)


def decode(message):
    return _schema.decode(message[8:], PLACE)


def test_a_schema_that_contradicts_itself(tmp_path):
    column = _schema.Column("value", "x", "uint32")
    message = encode(_schema.Schema((), None, (_schema.Key("x", '"*"', (column,), 0),)))
    assert [key.name for key in decode(message).keys] == ["x"]
    assert message.count(b"uint32") == 1
    with pytest.raises(_flatbuffers.DamagedError, match="not stored as its dtype uint64 says"):
        decode(message.replace(b"uint32", b"uint64"))
    huge = _schema.Column("value", "x", "float32", (0, 10**9, 10**9))
    message = encode(_schema.Schema((), None, (_schema.Key("x", '"*"', (huge,), 0),)))
    with pytest.raises(_flatbuffers.DamagedError, match="too large a shape"):
        decode(message)
    twice = _schema.Key("x", '"*"', (_schema.Column("value", "x", "float32"),), 0)
    with pytest.raises(_flatbuffers.DamagedError, match="do not fit the keys"):
        decode(encode(_schema.Schema((), None, (twice, twice))))


def test_a_message_that_repeats_itself():
    """A thousand elements are one table with a thousand elements that are one table, and so on."""
    n = 1000
    vtable = struct.pack("<4H", 6, 8, 4, 0)  # at 4: field 0 is at +4
    inner = 24 + 4 * n
    innermost = inner + 12 + 4 * n
    message = (
        struct.pack("<I", 12)
        + vtable
        + struct.pack("<iI", 12 - 4, 4)
        + struct.pack(f"<{n + 1}I", n, *[inner - (24 + 4 * i) for i in range(n)])
        + struct.pack("<iI", inner - 4, 4)
        + struct.pack(f"<{n + 1}I", n, *[innermost - (inner + 12 + 4 * i) for i in range(n)])
        + struct.pack("<iI", innermost - 4, 0)
    )
    read = 0
    with pytest.raises(_flatbuffers.DamagedError, match="the message contains more than fits into it"):
        for table in _flatbuffers.Table.root(message).tables(0):
            read += len(table.tables(0))
    assert read == n


def test_offsets_that_point_outside():
    with pytest.raises(_flatbuffers.DamagedError, match="points outside"):
        _flatbuffers.Table.root(struct.pack("<Ii", 4, 16) + bytes(100))  # a vtable before the beginning
    with pytest.raises(_flatbuffers.DamagedError, match="points outside"):
        _flatbuffers.Table.root(struct.pack("<I", 1000))


def test_a_structure_of_many_levels():
    structure = '"*"'
    for _ in range(5_000):
        structure = f'{{"list": [{structure}]}}'
    column = _schema.Column("value", "x", "float32")
    message = encode(_schema.Schema((), None, (_schema.Key("x", structure, (column,), 0),)))
    with pytest.raises(_flatbuffers.DamagedError, match="makes no sense"):
        decode(message)


def test_a_batch_that_lies_about_its_length(tmp_path):
    lox.save({"x": f32(1)}, tmp_path)
    (segment,) = segments(tmp_path)
    data = bytearray(segment.read_bytes())
    header = len(schema_bytes(bytes(data)))
    for rows in (2**62, 2**40, 10**6, 2, -1):
        data[header + 64 : header + 72] = rows.to_bytes(8, "little", signed=True)
        segment.write_bytes(data)
        with pytest.warns(lox.LoxWarning, match="damaged files"):
            assert len(lox.load(tmp_path)["x"]) == 0
