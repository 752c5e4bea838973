// What a client's file runs with. Prints one JSON line for each scenario.
export const URL = process.env.BATON_URL;
export const BASE = `${URL}/v1`;
export const KEY = process.env.BATON_KEY;
export const MODEL = process.env.BATON_MODEL ?? "default";
export const SENTENCE = "Paris is the capital of France.";
export const QUESTION = "What is the capital of France?";

const scenarios = [];

export function scenario(name, run) {
  scenarios.push({ name, run });
}

export function check(value, what = "") {
  if (!value) throw new Error(`not so: ${what}`);
}

export async function run() {
  for (const { name, run } of scenarios) {
    try {
      await run();
      tell(name, "works", "");
    } catch (error) {
      console.error(error);
      tell(name, "fails", `${error.name}: ${error.message}`.slice(0, 400));
    }
  }
}

function tell(scenario, result, why) {
  console.log("@" + JSON.stringify({ scenario, result, why }));
}
