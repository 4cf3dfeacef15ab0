"""/tokenize and /detokenize; chat prompts are tokenised as /v1/chat/completions would."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from hemiola.errors import HemiolaError
from hemiola.serve.encoding import json_response
from hemiola.serve.errors import ApiError, of_request
from hemiola.serve.prompts import chat_prompt
from hemiola.serve.schemas import DetokenizeRequest, TokenizeRequest
from hemiola.serve.service import Service
from hemiola.serve.tokens import token_text


def tokenization_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        service.check_model(body.model)
        tokenizer = service.need_tokenizer()
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "either prompt or messages is needed", param="prompt")
        if body.messages is not None:
            prompt = await chat_prompt(
                tokenizer,
                body.messages,
                body.tools,
                body.chat_template_kwargs or {},
                body.add_generation_prompt is not False,
            )
            ids = prompt.ids
        else:
            try:
                ids = await asyncio.to_thread(tokenizer.encode, body.prompt or "", body.add_special_tokens is not False)
            except HemiolaError as error:
                raise of_request(error) from error
        answer = {"count": len(ids), "max_model_len": service.engine.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [token_text(tokenizer, token) for token in ids]
        return json_response(answer)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        service.check_model(body.model)
        tokenizer = service.need_tokenizer()
        for position, token in enumerate(body.tokens):
            if not 0 <= token < service.engine.vocab_size:
                raise ApiError(400, f"tokens[{position}]: no such token id {token}", param=f"tokens[{position}]")
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, False)
        return json_response({"prompt": text})

    return router
