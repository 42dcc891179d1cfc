// Asks the server, or in a self-contained page, looks up the embedded answers.

const embedded = document.getElementById("answers");
const answers = embedded ? await unpacked(embedded.textContent) : null;

export const offline = answers !== null;

function unpacked(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

export class Failure extends Error {}

/** Ask a question of slimectl/viewer/api.py. Throws Failure with one line to show. */
export async function ask(question, parameters = {}) {
  const query = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null && value !== "")
    .sort(([left], [right]) => (left < right ? -1 : 1)).map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
  const address = query ? `${question}?${query}` : question;
  if (offline) {
    if (address in answers) return structuredClone(answers[address]);
    throw new Failure("This file does not contain that page. Open the run with slimectl view.");
  }
  let response;
  try {
    response = await fetch(`api/${address}`);
  } catch {
    throw new Failure("The server is not answering: slimectl view has ended. Start it again and open its new address.");
  }
  const answer = await response.json();
  if (!response.ok) throw new Failure(answer.error ?? `error ${response.status}`);
  return answer;
}
