// OpenAI's own client for JavaScript.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { BASE, KEY, MODEL, QUESTION, SENTENCE, check, run, scenario } from "./scenarios.mjs";

const client = new OpenAI({ baseURL: BASE, apiKey: KEY, maxRetries: 0, timeout: 30_000 });
const user = { role: "user", content: QUESTION };
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

scenario("chat", async () => {
  const answer = await client.chat.completions.create({ model: MODEL, messages: [user] });
  check(answer.choices[0].message.content === SENTENCE, "the sentence");
});

scenario("stream", async () => {
  let text = "";
  const chunks = await client.chat.completions.create({ model: MODEL, messages: [user], stream: true });
  for await (const chunk of chunks) text += chunk.choices[0]?.delta?.content ?? "";
  check(text === SENTENCE, text);
});

scenario("second turn", async () => {
  const first = await client.chat.completions.create({ model: MODEL, messages: [user] });
  const messages = [user, first.choices[0].message, user];
  const again = await client.chat.completions.create({ model: MODEL, messages });
  check(again.choices[0].message.content === SENTENCE, "the sentence");
});

scenario("tools", async () => {
  let called = 0;
  const weather = {
    type: "function",
    function: { name: "weather", parameters, parse: JSON.parse, function: () => ((called += 1), "sunny") },
  };
  const runner = client.chat.completions.runTools({ model: MODEL, messages: [user], tools: [weather] });
  check((await runner.finalContent()) === SENTENCE, "the sentence");
  check(called === 1, `${called} calls`);
});

scenario("schema", async () => {
  const Place = z.object({ name: z.string(), people: z.number() });
  const answer = await client.chat.completions.parse({
    model: MODEL,
    messages: [user],
    response_format: zodResponseFormat(Place, "place"),
  });
  check(Place.parse(answer.choices[0].message.parsed), "a place");
});

scenario("errors", async () => {
  for (const [more, kind] of [
    [{ model: "no" }, OpenAI.NotFoundError],
    [{ messages: [] }, OpenAI.BadRequestError],
  ]) {
    const failed = await client.chat.completions
      .create({ model: MODEL, messages: [user], ...more })
      .catch((error) => error);
    check(failed instanceof kind, kind.name);
  }
});

scenario("embeddings", async () => {
  const answer = await client.embeddings.create({ model: MODEL, input: ["a cat", "a kitten"] });
  check(answer.data.length === 2 && answer.data[0].embedding.length > 0, "two vectors");
});

scenario("responses", async () => {
  const answer = await client.responses.create({ model: MODEL, input: QUESTION });
  check(answer.output_text === SENTENCE, answer.output_text);
});

await run();
