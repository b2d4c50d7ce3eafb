"""What lox uses of `jax.extend`, taken from where JAX has it.

Importing any part of `jax.extend` imports all of it, since 0.12 with Pallas: that takes longer than importing lox.
"""

from typing import Any

from jax._src import core as _core
from jax._src.core import Jaxpr as Jaxpr
from jax._src.core import Literal as Literal
from jax._src.core import Primitive as Primitive
from jax._src.core import Var as Var
from jax._src.core import closed_call_p as closed_call_p
from jax._src.core import jaxpr_as_fun as jaxpr_as_fun
from jax._src.core import set_current_trace as set_current_trace
from jax._src.core import take_current_trace as take_current_trace
from jax._src.linear_util import StoreException as StoreException
from jax._src.linear_util import WrappedFun as WrappedFun
from jax._src.linear_util import transformation2 as transformation2
from jax._src.pjit import jit_p as jit_p
from jax._src.source_info_util import current_name_stack as current_name_stack
from jax._src.source_info_util import new_name_stack as new_name_stack
from jax._src.source_info_util import user_context as user_context

ClosedJaxpr: Any = getattr(_core, "ClosedJaxpr", Jaxpr)  # since 0.11 they are one class
