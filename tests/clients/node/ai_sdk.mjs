// Vercel's AI SDK, by its package for servers like OpenAI's and by the one for OpenAI.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embedMany, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { BASE, KEY, MODEL, QUESTION, SENTENCE, check, run, scenario } from "./scenarios.mjs";

const openai = createOpenAI({ baseURL: BASE, apiKey: KEY });
const compatible = createOpenAICompatible({
  name: "baton",
  baseURL: BASE,
  apiKey: KEY,
  supportsStructuredOutputs: true,
});
const chats = [openai.chat(MODEL), compatible(MODEL)];
const common = { prompt: QUESTION, maxRetries: 0 };
const Place = z.object({ name: z.string(), people: z.number() });
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async () => "sunny",
});

scenario("chat", async () => {
  for (const model of chats) check((await generateText({ model, ...common })).text === SENTENCE, "text");
});

scenario("stream", async () => {
  for (const model of chats) {
    let text = "";
    for await (const piece of streamText({ model, ...common }).textStream) text += piece;
    check(text === SENTENCE, text);
  }
});

scenario("second turn", async () => {
  for (const model of chats) {
    const first = await generateText({ model, ...common });
    const user = { role: "user", content: QUESTION };
    const again = await generateText({
      model,
      maxRetries: 0,
      messages: [user, ...first.response.messages, user],
    });
    check(again.text === SENTENCE, again.text);
  }
});

scenario("tools", async () => {
  for (const model of chats) {
    const told = await generateText({ model, ...common, tools: { weather }, stopWhen: stepCountIs(3) });
    check(told.text === SENTENCE, told.text);
    check(told.steps.length === 2, `${told.steps.length} steps`);
  }
});

scenario("schema", async () => {
  for (const model of chats) {
    const told = await generateText({ model, ...common, output: Output.object({ schema: Place }) });
    check(Place.parse(told.output), "a place");
  }
});

scenario("tools and schema", async () => {
  const told = await generateText({
    model: compatible(MODEL),
    ...common,
    tools: { weather },
    stopWhen: stepCountIs(3),
    output: Output.object({ schema: Place }),
  });
  check(Place.parse(told.output), "a place");
});

scenario("embeddings", async () => {
  const told = await embedMany({ model: compatible.embeddingModel(MODEL), values: ["a cat", "a kitten"] });
  check(told.embeddings.length === 2, "two vectors");
});

scenario("responses", async () => {
  const told = await generateText({ model: openai(MODEL), ...common });
  check(told.text === SENTENCE, told.text);
});

await run();
