"""``flashtile serve``: an engine behind OpenAI's HTTP interface, with vLLM's additions, on aiohttp."""
