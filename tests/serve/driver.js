// Uses the page as a person does, and posts its text to `/shown`. It runs in the page, before
// the script of the page, so that it hears of every error.
const shown = {problems: []};
addEventListener("error", event => shown.problems.push(event.message));
addEventListener("unhandledrejection", event => shown.problems.push(String(event.reason)));
document.addEventListener("securitypolicyviolation", event => shown.problems.push(event.blockedURI));

async function wait(condition) {
  for (const end = performance.now() + 30000; !condition();) {
    if (performance.now() > end) throw new Error(`never: ${condition}, but ${$("told").textContent}`);
    await new Promise(resolve => setTimeout(resolve, 50));
  }
}

const ended = part => () => !running && $("told").textContent.includes(part);
const marks = nodes => [...nodes].map(mark => mark.textContent + mark.className);
const curves = () => document.querySelectorAll("#charts path").length === 6;
const type = text => document.execCommand("insertText", false, text);  // as a keyboard does

function ask(prompt, length) {
  $("max_tokens").value = length;
  $("text").focus();
  document.execCommand("selectAll");
  type(prompt);
  $("text").dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", ctrlKey: true}));
}

async function useAll() {
  await wait(() => !$("writing").hidden);
  ask("ca", 4);
  await wait(ended("maximum length reached"));
  shown.written = [$("text").value, ...marks($("marked").children), $("told").textContent];
  type("!");
  shown.edited = [$("text").value, $("marked").textContent.slice(0, -1), $("marked").children.length];

  ask("endless", 5000);
  await wait(() => $("marked").children.length > 3);
  document.querySelector(".stop:not([hidden])").click();
  await wait(ended("stopped"));
  shown.stopped = $("text").value.length;
  ask("full", 4);
  await wait(ended("the queue is full"));

  $("chat-tab").click();
  $("system").value = "Be brief.";
  $("said").value = "Oui?";
  $("send").click();
  await wait(() => talk.length === 2);
  const classes = [...document.querySelectorAll(".assistant span")].map(mark => mark.className);
  shown.answer = [talk[1], classes];

  $("runs-tab").click();
  await wait(curves);
  shown.row = $("rows").innerText.split(/\s+/).filter(Boolean);
  await fetch("/trained", {method: "POST"});
  await wait(() => $("rows").innerText.includes("30 / 100"));
  shown.label = document.querySelector("#charts svg").getAttribute("aria-label");
}

addEventListener("load", async () => {
  try {
    if (innerWidth < 760) await useAll();
    else location.hash = "runs";
    await wait(() => !$("runs").hidden || $("runs-tab").click());
    if (innerWidth < 760) document.body.style.width = "390px";  // narrower than any window
    dispatchEvent(new Event("resize"));
    await wait(curves);
    shown.width = [document.body.scrollWidth, document.body.clientWidth];
    shown.hosts = [...new Set(performance.getEntriesByType("resource").map(entry => new URL(entry.name).host))];
  } catch (error) {
    shown.problems.push(error.message);
  }
  await fetch("/shown", {method: "POST", body: JSON.stringify(shown)});
});
