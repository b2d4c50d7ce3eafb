"""Programs of the specification that several tests use."""

import jax

import lox


def with_steps(xs):
    def body(i, carry):
        carry += xs[i]
        lox.log({"carry": carry}, step=i, episode=i // 2)
        return carry

    return jax.lax.fori_loop(0, len(xs), body, 0)
