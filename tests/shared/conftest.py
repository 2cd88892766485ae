"""Hypothesis without a time limit per example: two cores are shared by many, and time is no
property of the code under test."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
