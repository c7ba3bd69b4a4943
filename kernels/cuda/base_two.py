"""Softmax in powers of two, which is what GPUs compute: factors to base 2 and back.

Scores are multiplied by log2(e) with their scale; log-sum-exps are kept in base e.
"""

import math

import triton.language as tl

#: Factor of scores before `exp2`.
LOG2E = math.log2(math.e)
#: Factor of a base-2 logarithm, for kernels.
LN2 = tl.constexpr(math.log(2))
