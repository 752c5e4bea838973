// The chat box.
"use strict";

async function send(event) {
  event.preventDefault();
  state.chat?.abort();
  const chat = (state.chat = new AbortController());
  byId("answer").textContent = "";
  byId("told").textContent = "";
  byId("stop").hidden = false;
  try {
    const body = { model: await model(), stream: true, temperature: 0, max_tokens: Number(byId("tokens").value), messages: [{ role: "user", content: byId("prompt").value }] };
    const answer = await fetch("v1/chat/completions", {
      method: "POST", body: JSON.stringify(body), signal: chat.signal,
      headers: { ...headers(), "content-type": "application/json", "x-baton-mode": byId("mode").value },
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const id = answer.headers.get("x-request-id");
    await readEvents(answer.body, (text) => byId("answer").append(text));
    const why = element("button", { text: "Explain this request" });
    why.addEventListener("click", () => openHash("request", id));
    byId("told").replaceChildren(`${answer.headers.get("x-baton-route")} · `, why);
  } catch (error) {
    if (error.name !== "AbortError") byId("told").textContent = error.message;
  } finally {
    byId("stop").hidden = true;
  }
}

async function model() {
  state.model ??= (await get("v1/models")).data[0].id;
  return state.model;
}

async function readEvents(stream, show) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      show(event.choices[0]?.delta?.content ?? "");
    }
  }
}

function startChat() {
  byId("chat").addEventListener("submit", send);
  byId("stop").addEventListener("click", () => state.chat?.abort());
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("chat").requestSubmit();
  });
}
