"""Accumulators of the curvature, one file a structure."""

from lapwing.curvature.blocks import Block
from lapwing.curvature.curvature import Curvature
from lapwing.curvature.kinds import KINDS
from lapwing.curvature.structures import DENSE, STRUCTURES, StructureOptions

__all__ = ["DENSE", "KINDS", "STRUCTURES", "Block", "Curvature", "StructureOptions"]
