"""Runs on disk: append-only Arrow streams, which survive a crash and which every Arrow tool reads.

    DIR/<group-id>/meta.json           one group for each opening of a logger or of `lox.save`
    DIR/<group-id>/runs.jsonl          its runs: names, PRNG keys, hyper-parameters
    DIR/<group-id>/p0000-000.arrows    their events
    DIR/.lox/index                     where to find runs among many groups; it can be deleted

A segment (`.arrows`) is an Arrow IPC stream with the columns `run` (the number of a line in runs.jsonl), `wall`
(seconds since 1970), one for each step and one for each array that was logged; the metadata of a column give its key
and dtype. Other tools read it as it is:

    pyarrow.ipc.open_stream(file).read_all()
    polars.read_ipc_stream(file)

A row is an event of one run. Where up to 64 runs log together, as the lanes of a `vmap` do, a row is an event of all of
them: `run` is the first, what differs between them is a list with an item for each (`runs` in the metadata of the
column), and what does not is there once. To get a row for each of, say, 64 runs:

    frame.with_columns(polars.int_ranges("run", polars.col("run") + 64)).explode("run", "loss")

Dtypes that they do not know are stored as wider ones: bfloat16, float16 and float8 as float32, int4 as int8, complex
numbers as pairs, PRNG keys as their words. `lox.load` returns exactly the bits that were logged.

Everything has a checksum: every block of every column (in the metadata of its record batch, where other tools ignore
it), every schema, every line of runs.jsonl, and meta.json, which also has the sizes of the files of a closed group.
`lox.load` verifies what it reads. Files of format 1, which had none of this, are still read.

Several processes of one program have a group each, whose lines in runs.jsonl say which `part` of a run they are. Of an
array that is spread over them, each has blocks, columns of their own; the structure of the key says where they begin
and end, and the step `lox:event` which of them belong together.

`compact` merges groups. The list of runs of a merged group begins with the groups that it replaces: readers ignore them
if they are still there.

Most users need only `lox.save`, `lox.load` and `lox.runs`. `Writer` and `Reader` are for loggers and dashboards.
"""

from lox.store import names as names
from lox.store._compact import compact as compact
from lox.store._prng_keys import KeyData as KeyData
from lox.store._reader import Cursor as Cursor
from lox.store._reader import Reader as Reader
from lox.store._reader import Runs as Runs
from lox.store._reader import load as load
from lox.store._reader import runs as runs
from lox.store._repair import repair as repair
from lox.store._table import Run as Run
from lox.store._table import RunTable as RunTable
from lox.store._writer import Writer as Writer
