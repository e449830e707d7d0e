"""Faults drawn by a program, the tests that cover their lines, and whether those notice."""
