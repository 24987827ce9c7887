"""Plans of experiments: run, recorded, verified, and shown as tables and pages."""
