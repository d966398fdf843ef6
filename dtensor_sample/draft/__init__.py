"""Drafting: where draft tokens come from and what is kept of how they were drawn."""
