"""Catalogue, planning, sessions, jobs and measuring: what turns recipes into runs."""
