"""An HTTP server that speaks the API of OpenAI: `/v1/chat/completions`, `/v1/completions`, `/v1/models`.

`app` answers, `bodies` reads what is asked, `replies` says it in OpenAI's words, `worker` runs one request after
another. Needs the extra `server`.
"""
