"""Texts of errors of other libraries, as commands print them."""

import re

import httpx


def http_reason(error: httpx.HTTPError) -> str:
    """Return the server's message of a refused call, or why the call was not answered."""
    if isinstance(error, httpx.HTTPStatusError):
        return answer_reason(error.response)
    if isinstance(error, httpx.ConnectError):
        hint = ""
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            hint = "; name the file of the CA with `baton --cacert FILE` or BATON_CACERT"
        return f"cannot connect: {without_number(error)}{hint}"
    return str(error) or type(error).__name__


def answer_reason(answer: httpx.Response) -> str:
    """Return the status and the message of a response that is an error; its body has been read."""
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = answer.text[:200] or answer.reason_phrase
    hint = ""
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        hint = "; the environment variable OPENAI_API_KEY has the key of this command"
    return f"{answer.status_code}: {message}{hint}"


def file_reason(error: OSError) -> str:
    """Return ``FILE: No such file or directory``, without the number of the error."""
    if error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return without_number(error)


def without_number(error: Exception) -> str:
    """Return the text of an error without a leading ``[Errno 111]``."""
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error))
