"""An OpenAI-compatible server over one target and one draft; needs the extra ``serve``. Docs: docs/server.md."""
