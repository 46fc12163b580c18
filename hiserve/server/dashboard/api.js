// Requests to this server. The key stays in the tab and travels in one header only.

const NAME = "hiserve-key";
export const mode = document.documentElement.dataset.key; // none, key, or absent: no key opens the routes of operators

export const key = {
  get: () => sessionStorage.getItem(NAME) ?? "",
  set: (value) => (value ? sessionStorage.setItem(NAME, value) : sessionStorage.removeItem(NAME)),
};

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const reply = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (!reply.ok) {
    const body = await reply.json().catch(() => null);
    throw new Refused(reply.status, body?.error?.message ?? `${reply.status} ${reply.statusText}`);
  }
  return reply;
}

export const json = async (path) => (await ask(path)).json();

export const post = (path, body, signal) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });
