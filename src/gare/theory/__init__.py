"""The paper's derivations in closed form: the trust region of its appendix, and the bottleneck."""

from gare.theory import information_bottleneck, trust_region

__all__ = ["information_bottleneck", "trust_region"]
