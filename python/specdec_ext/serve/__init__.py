"""The OpenAI-compatible server; needs the extra specdec_ext[serve] (docs/serve.md).

`create_app(llm, settings)` (app.py) is the ASGI application, `specdec serve` runs it under uvicorn.
"""
