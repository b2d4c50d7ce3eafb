"""All that lox knows about JAX's versions and internals; no other module does.

Each helper gives one answer for every supported JAX (0.8 and later). Where versions differ, the branch says since
when, so that it can go once the older version is no longer supported.
"""

from lox._compat._effects import *
from lox._compat._jaxprs import *
from lox._compat._lowering import *
from lox._compat._modes import *
from lox._compat._parameters import *
from lox._compat._patches import *
from lox._compat._processes import *
from lox._compat._shards import *
from lox._compat._traces import *
from lox._compat._types import *
