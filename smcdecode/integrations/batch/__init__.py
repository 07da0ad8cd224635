"""A job of many prompts from files to files, resumable; needs the extra ``batch``. Docs: docs/scale.md."""
