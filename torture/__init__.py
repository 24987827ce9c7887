"""Torture: kills, damaged files, full disks and hostile requests against the real commands.

`make torture`, or `python -m torture [PART ...]`. docs/reliability.md says what must hold.
"""
