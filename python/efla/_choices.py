"""Types of the arguments that are one of a few words: editors complete the words, and type checkers refuse others."""

from typing import Literal

Mode = Literal["chunk", "fused_recurrent"]
Normalization = Literal["l2", "sum"]
Activation = Literal["silu", "relu", "elu", "identity"]
GateActivation = Literal["swish", "silu", "sigmoid"]
# fmt: off
RuleName = Literal[
    "deltanet", "deltanet-neg", "deltanet-neg-fla", "efla", "efla-adaptive", "efla-loose", "rk2", "rk4", "longhorn", "trapezoid",
    "gdn", "efla-gdn", "kda", "kda-exact", "kda-exact-nol2", "efla-kda", "linear",
]
Step = Literal[
    "euler", "exact", "implicit_euler", "trapezoid",
    "rk1", "rk2", "rk3", "rk4", "rk5", "rk6", "rk7", "rk8", "rk9", "rk10", "rk11", "rk12", "rk13", "rk14", "rk15", "rk16", "rk17",
    "rk18", "rk19", "rk20", "rk21", "rk22", "rk23", "rk24", "rk25", "rk26", "rk27", "rk28", "rk29", "rk30", "rk31", "rk32",
    "rk33", "rk34", "rk35", "rk36", "rk37", "rk38", "rk39", "rk40", "rk41", "rk42", "rk43", "rk44", "rk45", "rk46", "rk47",
    "rk48", "rk49", "rk50", "rk51", "rk52", "rk53", "rk54", "rk55", "rk56", "rk57", "rk58", "rk59", "rk60", "rk61", "rk62",
    "rk63", "rk64",
]
# fmt: on
