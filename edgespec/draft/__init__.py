"""Drafters: components that propose tokens for the target to verify."""

from __future__ import annotations

from edgespec.draft.base import DRAFTERS, DraftSetup, EarlyStop, TreePlan, create_drafter, register_drafter

__all__ = ["DRAFTERS", "DraftSetup", "EarlyStop", "TreePlan", "create_drafter", "register_drafter"]
